"""Seeds of the simulation. `TXMQ_SEEDS=from:to` runs others; a failure names its
seed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog

from tests.reporting import Report
from tests.simulation.history import Broken
from tests.simulation.planted import BUGS, Bug
from tests.simulation.world import World

pytestmark = pytest.mark.timeout(900)  # it only calculates, and on a busy machine for long
SEEDS = 2_000
SOAK_FIRST, SOAK_SEEDS = 100_000, 10_000
PIECE = 100  # seeds in one test: the tests of a run are shared out to the processor's cores
BUG_SEEDS = 60
ENOUGH = {
    "seen": 50,
    "committed": 2,
    "power cuts": 1,
    "connections cut": 4,
    "letters": 2,
    "moved to retry": 10,
    "foreign": 0.25,
    "home": 0.25,
    "recovered": 0.1,
    "by hand": 0.05,
    "fenced": 0.5,
    "large": 3,
    "committed together": 0.5,
    "decided together": 0.5,
    "sent together": 1,
    "runs": 5,
    "delayed": 0.2,
    "recalled": 0.02,
    "recalled too late": 0.005,
    "grown": 0.01,
    "resets": 0.02,
}  # a seed, on average


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Without the broker's log, for these tests only."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)


def _pieces(first: int, last: int) -> list[tuple[int, int]]:
    return [(start, min(start + PIECE, last)) for start in range(first, last, PIECE)]


def _chosen() -> list[tuple[int, int]]:
    first, _, last = os.environ.get("TXMQ_SEEDS", f"0:{SEEDS}").partition(":")
    return _pieces(int(first), int(last))


def _holds_for(first: int, last: int) -> Counter[str]:
    """The counts of seeds first..last-1; AssertionError with the seed of the first that
    fails.
    """
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            counts.update(World(seed).run().counts)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    for what, least in ENOUGH.items():
        seen = counts[what]
        assert seen >= least * (last - first), (
            f"too few {what} for the run to mean anything: {seen}"
        )
    return counts


@pytest.mark.parametrize(("first", "last"), _chosen())
def test_every_invariant_holds_whatever_the_seed(first: int, last: int, report: Report) -> None:
    report({"seeds": last - first, **_holds_for(first, last)})


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(("first", "last"), _pieces(SOAK_FIRST, SOAK_FIRST + SOAK_SEEDS))
def test_ten_thousand_more_seeds(first: int, last: int, report: Report) -> None:
    report({"seeds": last - first, **_holds_for(first, last)})


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with bug.around():
        assert any(_fails(seed, bug) for seed in range(BUG_SEEDS)), (
            f"{BUG_SEEDS} seeds did not find: {bug.name}"
        )


def _fails(seed: int, bug: Bug) -> bool:
    """Whether this seed finds the bug: a broken invariant, or a part of the broker that
    trips over it.
    """
    try:
        World(seed, bug).run()
    except (Broken, Exception):  # whatever stops the run has found it
        return True
    return False
