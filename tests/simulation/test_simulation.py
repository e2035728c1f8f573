"""Seeds of the simulation, and the planted bugs that they must find.

`TXMQ_SEEDS=1234:1235` runs these seeds instead; a failure names its seed.
"""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import structlog

from tests.reporting import Report
from tests.simulation import client_consumers
from tests.simulation.client_consumers import SLOW
from tests.simulation.planted_bugs import BUGS, Bug
from tests.simulation.seeds import chosen, find_bug, ranges
from tests.simulation.simulation import Simulation

pytestmark = pytest.mark.timeout(900)  # seeds need processor time only, which a busy machine lacks
SEEDS = 200  # 0.2 to 0.6 s of CPU each; make soak has 10,000 others
FIRST_SEEDS = 50  # those of every change
SLOW_SEEDS = 60
SOAK_FIRST, SOAK_SEEDS = 100_000, 10_000
SEEDS_PER_TEST = 100  # several tests, so that processes share them
LEAST_PER_SEED = {
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
    "inboxes restored": 0.2,
    "effects restored": 0.5,
    "skips": 0.1,
    "reprocesses": 0.1,
    "groups deleted": 0.03,
    "clocks set by days": 0.5,
    "clocks confirmed": 0.02,
    "nacks refused": 0.3,
    "topics remade": 0.1,
    "stored retried": 0.05,
    "edits": 0.2,
    "plans": 0.2,  # of operators; policies make the others
    "planned processed": 0.2,
    "planned by policies": 0.1,
    "edited received": 0.2,
    "trials": 0.03,
    "retry.now": 0.05,
    "retry.bury": 0.05,
    "copies": 0.05,
    "accepted unwanted": 0.02,
}  # on average; a count below it means that seeds no longer test this


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Drop the log of the broker."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def _run_seeds(first: int, last: int) -> Counter[str]:
    """Return the counts of seeds first..last-1.

    Raises AssertionError with the first seed that fails. Lower bounds of the counts
    are averages, so they hold for ranges of at least SEEDS_PER_TEST seeds.
    """
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            counts.update(Simulation(seed).run().counts)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    if last - first >= SEEDS_PER_TEST:
        too_few = {
            name: counts[name]
            for name, least in LEAST_PER_SEED.items()
            if counts[name] < least * (last - first)
        }
        assert not too_few, f"{last - first} seeds have too few of {too_few}"
    return counts


@pytest.mark.parametrize(("first", "last"), ranges(0, FIRST_SEEDS, FIRST_SEEDS // 2))
def test_every_invariant_holds_for_the_first_seeds(first: int, last: int) -> None:
    _run_seeds(first, last)


@pytest.mark.parametrize(("first", "last"), chosen(SEEDS, SEEDS_PER_TEST))
def test_every_invariant_holds_for_every_seed(first: int, last: int, report: Report) -> None:
    report({"seeds": last - first, **_run_seeds(first, last)})


@pytest.mark.parametrize(("first", "last"), chosen(SLOW_SEEDS, SLOW_SEEDS))
def test_every_invariant_holds_with_slow_handlers(first: int, last: int) -> None:
    with patch.multiple(client_consumers, **SLOW):
        _run_seeds(first, last)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    ("first", "last"), ranges(SOAK_FIRST, SOAK_FIRST + SOAK_SEEDS, SEEDS_PER_TEST)
)
def test_ten_thousand_more_seeds(first: int, last: int, report: Report) -> None:
    report({"seeds": last - first, **_run_seeds(first, last)})


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, report: Report) -> None:
    with bug.around():
        find_bug(bug.name, bug.first, lambda seed: Simulation(seed, bug.plant).run(), report)


def test_a_planted_bug_that_no_longer_fits_the_code_is_not_taken_for_found(report: Report) -> None:
    misfit = Bug("a misfit", around=lambda: patch.object(Simulation, "run", lambda: None))
    with misfit.around(), pytest.raises(TypeError):
        find_bug(misfit.name, 0, lambda seed: Simulation(seed).run(), report)
