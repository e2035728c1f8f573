"""Seeds of three nodes over a hostile partition, and planted bugs that they find.

`TXMQ_SEEDS=1234:1235` runs these seeds instead; a failure names its seed.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.reporting import Report
from tests.simulation.seeds import chosen, find_bug, ranges
from tests.simulation.shared_bugs import BUGS, Bug
from tests.simulation.shared_nodes import Cluster

SEEDS = 40
SOAK_FIRST, SOAK_SEEDS = 100_000, 10_000
SEEDS_PER_TEST = 20
LEAST_PER_SEED = {
    "leaders": 3,
    "confirmed": 60,
    "served": 3_000,
    "deposed": 0.3,
    "undelivered": 0.2,
    "resigned": 0.2,
    "forgotten": 0.4,
    "stood still": 3,
    "crashes": 2,
    "cut off": 2,
    "appended twice": 0.5,
    "taken for a duplicate": 0.5,
    "late copies": 0.4,
    "given up and appended": 0.3,
    "said": 10,
}  # on average; a count below it means that seeds no longer test this


def _run_seeds(first: int, last: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            counts.update(Cluster(seed, says=bool(seed % 2)).run())
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


@pytest.mark.parametrize(("first", "last"), chosen(SEEDS, SEEDS_PER_TEST))
def test_a_shared_log_is_one_log_whatever_happens(first: int, last: int, report: Report) -> None:
    report({"seeds": last - first, **_run_seeds(first, last)})


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(("first", "last"), ranges(SOAK_FIRST, SOAK_FIRST + SOAK_SEEDS, 500))
def test_ten_thousand_more_seeds_of_a_shared_log(first: int, last: int, report: Report) -> None:
    report({"seeds": last - first, **_run_seeds(first, last)})


SIMULATED = [bug for bug in BUGS if bug.first is not None]


@pytest.mark.parametrize("bug", SIMULATED, ids=lambda bug: bug.name)
def test_a_planted_bug_of_a_shared_log_is_found(bug: Bug, report: Report) -> None:
    assert bug.first is not None
    with bug.around():
        find_bug(bug.name, bug.first, lambda seed: Cluster(seed, bug.plant).run(), report)
