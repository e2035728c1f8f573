"""How tests are shared out: which begin first, and what runs beside what."""

from __future__ import annotations

from itertools import pairwise

from tests.reporting import when_to_begin

SEEDS = {f"seeds-{number}": "simulation" for number in range(4)}
FILES = {f"client/{number}": "client" for number in range(10)}
KILLS = {f"kills-{number}": "system" for number in range(2)}


def in_order(folders: dict[str, str]) -> list[str]:
    begins = when_to_begin(folders)
    return sorted(folders, key=begins.__getitem__)


def test_the_longest_begin_first() -> None:
    assert in_order(FILES | KILLS | {"spark": "spark", "demo": "demo"})[:4] == [
        "demo",
        "spark",
        *KILLS,
    ]


def test_what_calculates_runs_beside_all_that_waits_and_is_not_left_to_the_end() -> None:
    order = in_order(FILES | SEEDS | KILLS)
    places = [order.index(group) for group in SEEDS]
    assert all(2 <= after - before <= 5 for before, after in pairwise(places))
    assert order[-2:] == list(FILES)[-2:]


def test_any_folder_may_be_all_there_is() -> None:
    for folders in (SEEDS, KILLS, FILES, {"spark": "spark"}, {}):
        assert in_order(folders) == list(folders)
