"""Benchmarks of this tree beside those of an earlier commit, in alternating rounds.

A slow or busy machine slows both sides, so only their ratio is told, with the smallest
and the largest ratio of one round.
"""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.bench.harness import ROOT, BenchError
from tests.bench.rows import ROWS

NOT_RUN = "not run: "  # before what a run prints of a benchmark that failed


class Figure(NamedTuple):
    """The value of a row in one run, and that of its yardstick."""

    value: float
    yardstick: float | None = None


Figures = Mapping[str, Figure]


class Compared(NamedTuple):
    """One row of both trees: medians, and new / old of each round. `yardstick` is the
    median of its own new / old, which should be 1: the machine is as quiet as that.
    """

    id: str
    unit: str
    old: float
    new: float
    ratios: tuple[float, ...]
    yardstick: float | None

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios: a slow round moves both of its sides."""
        return statistics.median(self.ratios)


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Have the files of a commit in a directory during the block.

    It is no worktree: of a run that is killed git keeps nothing.
    """
    argv = ["git", "archive", "--format=tar", commit]
    done = subprocess.run(argv, check=False, cwd=ROOT, capture_output=True)
    if done.returncode:
        raise BenchError(f"git archive: {done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="txmq-bench-") as directory:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(directory, filter="data")
        yield Path(directory)


def figures(
    tree: Path, options: Sequence[str], units: dict[str, str], failures: set[str]
) -> Figures:
    """Run the benchmarks of a tree with this interpreter, and return its rows."""
    with tempfile.TemporaryDirectory(prefix="txmq-bench-") as directory:
        out = Path(directory) / "bench.json"
        argv = [sys.executable, "-m", "tests.bench", *options, "--out", str(out)]
        done = subprocess.run(argv, check=False, cwd=tree, capture_output=True, text=True)
        rows = ROWS.validate_json(out.read_bytes()) if out.exists() else []
    for line in done.stdout.splitlines():
        if line.startswith(NOT_RUN):
            failures.add(f"{line} (in {tree})")
    if not rows:
        raise BenchError(f"no row of {tree}: {done.stderr.strip()[-2000:]}")
    units.update({row.id: row.unit for row in rows})
    return {row.id: Figure(row.value, row.yardstick) for row in rows}


def compared(rounds: Sequence[tuple[Figures, Figures]], units: Mapping[str, str]) -> list[Compared]:
    """Return the rows that both trees have in every round, with their ratios.

    A row whose old value is 0 has no ratio and is left out.
    """
    result = []
    for row_id in rounds[0][1]:
        pairs = [
            (old[row_id], new[row_id]) for old, new in rounds if row_id in old and row_id in new
        ]
        if len(pairs) == len(rounds) and all(old.value for old, _ in pairs):
            old, new = (
                statistics.median(one.value for one in side) for side in zip(*pairs, strict=True)
            )
            ratios = tuple(new.value / old.value for old, new in pairs)
            beside = [
                new.yardstick / old.yardstick
                for old, new in pairs
                if old.yardstick and new.yardstick
            ]
            yardstick = statistics.median(beside) if beside else None
            result.append(Compared(row_id, units[row_id], old, new, ratios, yardstick))
    return result


def left_out(rounds: Sequence[tuple[Figures, Figures]], rows: Sequence[Compared]) -> list[str]:
    """Return the rows of any round that have no ratio."""
    measured = {row_id for round_ in rounds for side in round_ for row_id in side}
    return sorted(measured - {row.id for row in rows})


def table(rows: Sequence[Compared], commit: str) -> Table:
    view = Table()
    names = ("id", commit, "this tree", "unit", "new / old", "from", "to", "yardstick new / old")
    for name in names:
        view.add_column(name, justify="left" if name in {"id", "unit"} else "right", no_wrap=True)
    for row in rows:
        shares = [f"{value:.3f}" for value in (row.ratio, min(row.ratios), max(row.ratios))]
        yardstick = "" if row.yardstick is None else f"{row.yardstick:.3f}"
        view.add_row(row.id, f"{row.old:,.4g}", f"{row.new:,.4g}", row.unit, *shares, yardstick)
    return view


def run_against(
    commit: str, rounds: int, options: Sequence[str], progress: Console, output: Console
) -> bool:
    """Measure a commit and this tree in alternating rounds, and print the ratios and
    what has none; return whether all benchmarks ran.

    Raises BenchError where a tree has no rows, or git cannot read the commit.
    """
    units, failures = dict[str, str](), set[str]()
    results = []
    with tree_of(commit) as old_tree:
        sides = [(commit, old_tree), ("this tree", ROOT)]
        for number in range(1, rounds + 1):
            found = {}
            for name, tree in sides:
                progress.print(f"round {number} of {rounds}: {name} ...", style="dim")
                found[tree] = figures(tree, options, units, failures)
            results.append((found[old_tree], found[ROOT]))
            sides.reverse()  # what comes first in a round is not always the same
    rows = compared(results, units)
    output.print(table(rows, commit))
    for row_id in left_out(results, rows):
        output.print(
            f"no ratio: {row_id}: not in each round of both trees, or 0 before", markup=False
        )
    for failure in sorted(failures):
        output.print(failure, style="red", markup=False)
    return not failures
