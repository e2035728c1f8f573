"""Benchmarks of this tree beside those of an earlier commit, in alternating rounds.

A slow or busy machine slows both sides, so only their ratio is told, with the smallest
and the largest ratio of one round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.bench.harness import ROOT, BenchError
from tests.bench.rows import ROWS

Figures = Mapping[str, float]


class Compared(NamedTuple):
    """One row of both trees: medians, and new / old of each round."""

    id: str
    unit: str
    old: float
    new: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios: a slow round moves both of its sides."""
        return statistics.median(self.ratios)


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Check out a commit in a worktree of its own during the block."""
    with tempfile.TemporaryDirectory(prefix="txmq-bench-") as directory:
        tree = Path(directory) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*args: str) -> None:
    done = subprocess.run(["git", *args], check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"git {args[0]}: {done.stderr.strip()}")


def figures(tree: Path, options: Sequence[str], units: dict[str, str]) -> Figures:
    """Run the benchmarks of a tree with this interpreter, and return its rows."""
    with tempfile.TemporaryDirectory(prefix="txmq-bench-") as directory:
        out = Path(directory) / "bench.json"
        argv = [sys.executable, "-m", "tests.bench", *options, "--out", str(out)]
        done = subprocess.run(argv, check=False, cwd=tree, capture_output=True, text=True)
        rows = ROWS.validate_json(out.read_bytes()) if out.exists() else []
    if not rows:
        raise BenchError(f"no row of {tree}: {done.stderr.strip()[-2000:]}")
    units.update({row.id: row.unit for row in rows})
    return {row.id: row.value for row in rows}


def compared(rounds: Sequence[tuple[Figures, Figures]], units: Mapping[str, str]) -> list[Compared]:
    """Return the rows that both trees have in every round, with their ratios.

    A row whose old value is 0 has no ratio and is left out.
    """
    result = []
    for row_id in rounds[0][1]:
        pairs = [
            (old[row_id], new[row_id]) for old, new in rounds if row_id in old and row_id in new
        ]
        if len(pairs) == len(rounds) and all(old for old, _ in pairs):
            old, new = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = tuple(new / old for old, new in pairs)
            result.append(Compared(row_id, units[row_id], old, new, ratios))
    return result


def table(rows: Sequence[Compared], commit: str) -> Table:
    view = Table()
    for name in ("id", commit, "this tree", "unit", "new / old", "from", "to"):
        view.add_column(name, justify="left" if name in {"id", "unit"} else "right", no_wrap=True)
    for row in rows:
        shares = (f"{value:.3f}" for value in (row.ratio, min(row.ratios), max(row.ratios)))
        view.add_row(row.id, f"{row.old:,.4g}", f"{row.new:,.4g}", row.unit, *shares)
    return view


def run_against(
    commit: str, rounds: int, options: Sequence[str], progress: Console, output: Console
) -> None:
    """Measure a commit and this tree in alternating rounds, and print the ratios.

    Raises BenchError where a tree has no rows, or git cannot check the commit out.
    """
    units: dict[str, str] = {}
    results = []
    with tree_of(commit) as old_tree:
        for number in range(1, rounds + 1):
            progress.print(f"round {number} of {rounds}: {commit} ...", style="dim")
            old = figures(old_tree, options, units)
            progress.print(f"round {number} of {rounds}: this tree ...", style="dim")
            results.append((old, figures(ROOT, options, units)))
    output.print(table(compared(results, units), commit))
