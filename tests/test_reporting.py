"""The order in which groups of tests start."""

from __future__ import annotations

from itertools import pairwise

from tests.reporting import start_order

SEEDS = {f"seeds-{number}": "simulation" for number in range(4)}
FILES = {f"client/{number}": "client" for number in range(10)}
KILLS = {f"kills-{number}": "system" for number in range(2)}


def in_order(folders: dict[str, str]) -> list[str]:
    starts = start_order(folders)
    return sorted(folders, key=starts.__getitem__)


def test_the_longest_begin_first() -> None:
    assert in_order(FILES | KILLS | {"spark": "spark", "demo": "demo"})[:4] == [
        "demo",
        "spark",
        *KILLS,
    ]


def test_simulations_run_beside_waiting_tests_and_not_at_the_end() -> None:
    order = in_order(FILES | SEEDS | KILLS)
    places = [order.index(group) for group in SEEDS]
    assert all(2 <= after - before <= 5 for before, after in pairwise(places))
    assert order[-2:] == list(FILES)[-2:]


def test_any_folder_may_be_the_only_one() -> None:
    for folders in (SEEDS, KILLS, FILES, {"spark": "spark"}, {}):
        assert in_order(folders) == list(folders)
