"""Seeds of the simulation. `TXMQ_SEEDS=from:to` runs others; a failure names its seed."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
import structlog

from tests.simulation.history import Broken
from tests.simulation.planted import BUGS, Bug
from tests.simulation.world import World

SEEDS, SOAK_SEEDS = 2_000, 10_000
PIECE = 50  # seeds in one task of a worker
BUG_SEEDS = 60
ENOUGH = {
    "seen": 50,
    "committed": 2,
    "power cuts": 1,
    "connections cut": 4,
    "letters": 2,
    "moved to retry": 10,
}  # a seed, on average


def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def _run(first: int, last: int) -> Counter[str]:
    """The counts of seeds first..last-1; AssertionError with the seed of the first that fails."""
    _quiet()
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            counts.update(World(seed).run().counts)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return counts


def _run_all(first: int, last: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    began = time.monotonic()
    starts = range(first, last, PIECE)
    pool = ProcessPoolExecutor(max_workers=os.cpu_count())
    try:
        for piece in pool.map(_run, starts, (min(start + PIECE, last) for start in starts)):
            counts.update(piece)
    finally:
        pool.shutdown(cancel_futures=True)
    print(f"{last - first} seeds in {time.monotonic() - began:.0f} s:", dict(counts))  # noqa: T201  # the figures of a run
    return counts


def _meant_something(counts: Counter[str], seeds: int) -> None:
    for what, least in ENOUGH.items():
        assert counts[what] >= least * seeds, f"too few {what} for the run to mean anything: {counts[what]}"


@pytest.mark.timeout(600)
def test_every_invariant_holds_whatever_the_seed() -> None:
    first, _, last = os.environ.get("TXMQ_SEEDS", f"0:{SEEDS}").partition(":")
    _meant_something(_run_all(int(first), int(last)), int(last) - int(first))


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_ten_thousand_more_seeds() -> None:
    _meant_something(_run_all(100_000, 100_000 + SOAK_SEEDS), SOAK_SEEDS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    _quiet()
    with bug.around():
        assert any(_fails(seed, bug) for seed in range(BUG_SEEDS)), f"{BUG_SEEDS} seeds did not find: {bug.name}"


def _fails(seed: int, bug: Bug) -> bool:
    """Whether this seed finds the bug: a broken invariant, or a part of the broker that trips over it."""
    try:
        World(seed, bug).run()
    except (Broken, Exception):  # noqa: BLE001  # whatever stops the run has found it
        return True
    return False
