"""Run the benchmarks: rows into bench.json, a table on standard output, progress on
standard error.

python -m tests.bench [--only PREFIX] [--scale 0.1] [--out bench.json] [--directory
out/bench] [--dsn DSN] [--list]

Exit status 0 if everything ran, goals met or not; 1 if a benchmark could not be run; 2
for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from tests.bench.database import Database
from tests.bench.harness import ROOT, BenchError, machine_line
from tests.bench.rows import ROWS, Benchmark, Row, Run
from tests.bench.suite import BENCHMARKS

FILE_WIDTH = 160  # of a table that goes to a file: nobody asks it how wide it is


class Outcome(NamedTuple):
    """What ran, and what could not."""

    rows: list[Row]
    failures: list[str]


def run_all(
    benchmarks: Sequence[Benchmark], run: Run, only: str, outcome: Outcome, console: Console
) -> None:
    """Run one after the other, telling each row at once. One that fails does not keep
    the others from running.
    """
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(benchmarks))
        for one in benchmarks:
            progress.update(task, description=f"{one.prefix}: {one.title}")
            progress.print(f"{one.prefix}: {one.title} ...", style="dim")
            try:
                for row in one.rows(run, only):
                    outcome.rows.append(row)
                    progress.print(
                        f"  {row.id}  {number(row.value)} {row.unit}",
                        highlight=False,
                        soft_wrap=True,
                    )
            except BenchError as error:
                outcome.failures.append(f"{one.prefix}: {error}")
                progress.print(f"  {error}", style="red", markup=False, soft_wrap=True)
            progress.advance(task)


def number(value: float | None) -> str:
    """Short enough to compare at a glance."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> Table:
    view = Table()
    view.add_column("id", no_wrap=True)
    view.add_column("what")
    for name in ("value", "yardstick", "ratio"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("goal")
    view.add_column("met")
    for row in rows:
        met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row.met]
        value = f"{number(row.value)} {row.unit}"
        view.add_row(
            row.id, row.what, value, number(row.yardstick), number(row.ratio), row.goal, met
        )
    return view


def report(outcome: Outcome, console: Console) -> None:
    """The table, then what is missed and what could not be run."""
    console.print(table(outcome.rows))
    for row in outcome.rows:
        if row.met is False:
            figure = row.value if row.ratio is None else row.ratio
            console.print(
                f"goal missed: {row.id}: {row.goal}, is {number(figure)}", style="red", markup=False
            )
    for failure in outcome.failures:
        console.print(f"not run: {failure}", style="red", markup=False)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Run the benchmarks of txmq."
    )
    parser.add_argument(
        "--only", default="", metavar="PREFIX", help="run what has ids that begin so, such as tx."
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the full counts and durations (1.0)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="file for the rows (bench.json)"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "out" / "bench",
        help="where to put files: the disk to be measured",
    )
    parser.add_argument(
        "--dsn", help="a PostgreSQL to use (else TXMQ_TEST_DSN, TXMQ_DSN, one started for the run)"
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks and leave")
    parsed = parser.parse_args(argv)
    if parsed.scale <= 0:
        parser.error(f"--scale must be above 0, not {parsed.scale}")
    return parsed


def main(argv: Sequence[str] | None = None, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> int:
    options = arguments(argv)
    chosen = [one for one in benchmarks if one.chosen_by(options.only)]
    if options.list or not chosen:
        names = "\n".join(f"{one.prefix:30} {one.title}" for one in benchmarks)
        print(
            names
            if options.list
            else f"no benchmark begins with {options.only}; there are\n{names}",
            file=sys.stdout if options.list else sys.stderr,
        )
        return 0 if options.list else 2
    progress, output = (
        Console(stderr=True),
        Console(width=None if sys.stdout.isatty() else FILE_WIDTH),
    )
    options.directory.mkdir(parents=True, exist_ok=True)
    dsn = options.dsn or os.environ.get("TXMQ_TEST_DSN") or os.environ.get("TXMQ_DSN")
    progress.print(machine_line(options.directory), highlight=False, soft_wrap=True)
    outcome = Outcome([], [])
    with (
        tempfile.TemporaryDirectory(dir=options.directory.resolve()) as directory,
        closing(Database(dsn)) as database,
    ):
        try:
            run_all(
                chosen,
                Run(Path(directory), options.scale, database),
                options.only,
                outcome,
                progress,
            )
        finally:
            options.out.write_bytes(ROWS.dump_json(outcome.rows, indent=1) + b"\n")
    report(outcome, output)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
