"""Run the benchmarks: rows into bench.json, a table on standard output, progress on
standard error.

    python -m tests.bench [--only PREFIX] [--scale 0.1] [--out bench.json]
        [--directory out/bench] [--dsn DSN] [--list]
        [--against COMMIT [--rounds 3]]

With `--against`, the rows of this tree and of a commit in alternating rounds, and their
ratios (`tests/bench/against.py`).

The exit status is 0 if all benchmarks ran, whether goals were met or not; 1 if a
benchmark could not run; 2 for wrong usage; 130 after an interrupt or SIGTERM. The table
has what was measured until then.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from math import inf
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

from tests.bench.against import NOT_RUN, run_against
from tests.bench.database import BenchDatabase
from tests.bench.harness import ROOT, BenchError, machine_line
from tests.bench.rows import ROWS, Benchmark, Row, Run, chosen_by
from tests.bench.suite import BENCHMARKS

FILE_WIDTH = 160  # columns of a table in a file


class SuiteResult(NamedTuple):
    """The rows of a run, and the benchmarks that failed."""

    rows: list[Row]
    failures: list[str]


def run_all(
    benchmarks: Sequence[Benchmark], run: Run, only: str, result: SuiteResult, console: Console
) -> None:
    """Run the benchmarks one by one and print each row at once.

    A failed benchmark does not stop the others.
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
                    result.rows.append(row)
                    progress.print(
                        f"  {row.id}  {number(row.value)} {row.unit}",
                        highlight=False,
                        soft_wrap=True,
                    )
            except Exception as error:  # noqa: BLE001  # whatever a server or a tool raises
                kind = "" if isinstance(error, BenchError) else f"{type(error).__name__}: "
                result.failures.append(f"{one.prefix}: {kind}{error}")
                progress.print(f"  {kind}{error}", style="red", markup=False, soft_wrap=True)
            progress.advance(task)


def number(value: float | None) -> str:
    """Format a figure briefly, for quick comparison."""
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


def report(result: SuiteResult, console: Console) -> None:
    """Print the table, then missed goals and failed benchmarks."""
    console.print(table(result.rows))
    for row in result.rows:
        if row.met is False:
            figure = row.value if row.ratio is None else row.ratio
            console.print(
                f"goal missed: {row.id}: {row.goal}, is {number(figure)}", style="red", markup=False
            )
    for failure in result.failures:
        console.print(f"{NOT_RUN}{failure}", style="red", markup=False)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Run the benchmarks of txmq."
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PREFIX",
        help="run only rows whose ids have this prefix, such as tx.",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor on counts and durations (1.0)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="file for the rows (bench.json)"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "out" / "bench",
        help="directory on the disk to measure",
    )
    parser.add_argument(
        "--dsn",
        help="PostgreSQL server to use (else TXMQ_TEST_DSN, TXMQ_DSN, one started for the run)",
    )
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare with a commit, in alternating rounds"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of --against (3)")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    parsed = parser.parse_args(argv)
    if not 0 < parsed.scale < inf:
        parser.error(f"--scale must be above 0 and finite, not {parsed.scale}")
    if not parsed.out.resolve().parent.is_dir():
        parser.error(f"--out: there is no directory {parsed.out.resolve().parent}")
    if parsed.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {parsed.rounds}")
    return parsed


def compare(options: argparse.Namespace, progress: Console, output: Console) -> int:
    """Measure this tree beside a commit; 1 if a benchmark of one of them failed."""
    passed = ["--only", options.only, "--scale", str(options.scale)]
    passed += ["--directory", str(options.directory.resolve())]
    passed += ["--dsn", options.dsn] if options.dsn else []
    try:
        complete = run_against(options.against, options.rounds, passed, progress, output)
    except BenchError as error:
        progress.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    return 0 if complete else 1


def main(argv: Sequence[str] | None = None, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> int:
    options = arguments(argv)
    chosen = chosen_by(options.only, benchmarks)
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
    if options.against:
        return compare(options, progress, output)
    result, interrupted = SuiteResult([], []), False
    with (
        tempfile.TemporaryDirectory(dir=options.directory.resolve()) as directory,
        closing(BenchDatabase(dsn)) as database,
    ):
        try:
            run_all(
                chosen,
                Run(Path(directory), options.scale, database),
                options.only,
                result,
                progress,
            )
        except KeyboardInterrupt:
            interrupted = True
        finally:
            options.out.write_bytes(ROWS.dump_json(result.rows, indent=1) + b"\n")
    report(result, output)
    if interrupted:
        return 130
    return 1 if result.failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers end with the run
    sys.exit(main())
