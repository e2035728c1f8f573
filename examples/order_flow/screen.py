"""The output of a run: phases with their times, events, and progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Update = Callable[[Mapping[str, int]], None]


class Screen:
    """The output of one run."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.times: list[tuple[str, float]] = []
        self._began = time.monotonic()

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """Print a heading, and measure the time of the block."""
        began = time.monotonic()
        self.console.rule(f"[bold]{title}", align="left")
        yield
        self.times.append((title, time.monotonic() - began))

    def event(self, text: str, style: str = "") -> None:
        """Print a line with the time since the start."""
        self.console.print(
            f"{time.monotonic() - self._began:7.1f} s  {text}", style=style, highlight=False
        )

    def echo(self, text: str) -> int:
        """Print the complete lines of another program's output; return their length."""
        lines = text[: text.rfind("\n") + 1]
        if lines:
            self.console.print(Text.from_ansi(lines.rstrip("\n")), soft_wrap=True)
        return len(lines)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show a status line during the block."""
        with self.console.status(what):
            yield

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make the output of other programs look the same."""
        return {"COLUMNS": str(self.console.width)} | (
            {"FORCE_COLOR": "1"} if self.console.is_terminal else {}
        )

    def show(self, what: RenderableType) -> None:
        self.console.print(what)

    @contextmanager
    def bars(self, totals: Mapping[str, int]) -> Iterator[Update]:
        """Show progress bars by name; yield the function that updates them."""
        columns = (
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        hidden = not self.console.is_terminal  # a file would get a bar of each run
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as progress:
            tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}

            def update(done: Mapping[str, int]) -> None:
                for name, task in tasks.items():
                    progress.update(task, completed=done[name])

            yield update

    def times_table(self) -> Table:
        """Return a table of the phases and their times."""
        table = Table("phase", "seconds", title="Times", title_justify="left")
        table.columns[1].justify = "right"
        for title, seconds in self.times:
            table.add_row(title, f"{seconds:.1f}")
        table.add_row("total", f"{time.monotonic() - self._began:.1f}", style="bold")
        return table
