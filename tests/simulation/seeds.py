"""Seeds of simulations: in ranges, and one after the other until one finds a bug."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.reporting import Report

BUG_SEEDS = 60
# What a planted function raises that no longer fits the code.
MISFITS = (AttributeError, ImportError, NameError, TypeError)


def ranges(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """Return first..last-1 in ranges of at most `size` seeds, a test each."""
    return [(start, min(start + size, last)) for start in range(first, last, size)]


def chosen(seeds: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of TXMQ_SEEDS, else of so many seeds from 0 on."""
    first, _, last = os.environ.get("TXMQ_SEEDS", f"0:{seeds}").partition(":")
    return ranges(int(first), int(last), size)


def find_bug(name: str, first: int, run: Callable[[int], object], report: Report) -> None:
    """Run seeds until one finds a planted bug, by a broken invariant or another error.
    Report the seed where it is not the first; fail where there is none.
    """
    found = next((seed for seed in range(first, first + BUG_SEEDS) if _fails(run, seed)), None)
    assert found is not None, f"{BUG_SEEDS} seeds did not find: {name}"
    if found != first:
        report({"found by the later seed": found})


def _fails(run: Callable[[int], object], seed: int) -> bool:
    try:
        run(seed)
    except MISFITS:
        raise
    except Exception:  # noqa: BLE001  # each error that ends the run has found the bug
        return True
    return False
