"""Ranges of offsets, against a model that stores every offset by itself."""

from __future__ import annotations

from random import Random

import pytest

from txmq.core.state.positions import GroupPosition
from txmq.core.state.ranges import RangeMap, gaps, pack, unpack

END = 40


def model(ranges: RangeMap[int]) -> dict[int, int]:
    return {offset: value for start, end, value in ranges for offset in range(start, end)}


@pytest.mark.parametrize("seed", range(20))
def test_a_range_map_behaves_as_a_map_of_single_offsets(seed: int) -> None:
    random = Random(seed)
    ranges: RangeMap[int] = RangeMap()
    single: dict[int, int] = {}
    for _ in range(100):
        start = random.randrange(END)
        end = random.randint(start, END)
        if random.random() < 0.6:
            value = random.randrange(3)
            ranges.put(start, end, value)
            single.update(dict.fromkeys(range(start, end), value))
        else:
            removed = {
                o: value for low, high, value in ranges.cut(start, end) for o in range(low, high)
            }
            assert removed == {o: single.pop(o) for o in range(start, end) if o in single}
        assert model(ranges) == single
        assert ranges.total == len(single)
        within = {
            o: value for low, high, value in ranges.overlap(start, end) for o in range(low, high)
        }
        assert within == {o: value for o, value in single.items() if start <= o < end}
        first = ranges.first(start)
        assert (first and first.start) == min((o for o in single if o >= start), default=None)


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_of_one_value_are_joined(seed: int) -> None:
    ranges: RangeMap[None] = RangeMap()
    offsets = list(range(100))
    Random(seed).shuffle(offsets)
    for offset in offsets:
        ranges.put(offset, offset + 1, None)
    assert list(ranges) == [(0, 100, None)]


def test_neighbours_of_different_values_stay_apart() -> None:
    assert len(RangeMap([(0, 5, 1), (5, 9, 2), (9, 10, 1)])) == 3


def test_an_empty_range_changes_nothing() -> None:
    ranges = RangeMap([(3, 6, 1)])
    ranges.put(4, 4, 2)
    assert ranges.cut(5, 5) == []
    assert ranges == RangeMap([(3, 6, 1)])


def test_gaps_are_the_offsets_that_no_range_covers() -> None:
    ranges = RangeMap([(2, 4, 1), (4, 5, 2), (8, 9, 1)])
    assert list(gaps(ranges, 0, 10)) == [(0, 2), (5, 8), (9, 10)]
    assert list(gaps(ranges.overlap(3, 5), 3, 5)) == []


@pytest.mark.parametrize("longest", [3, 500, 100_000])
def test_packed_ranges_come_back(longest: int) -> None:
    random = Random(longest)
    at = origin = 1 << 40
    ranges: RangeMap[None] = RangeMap()
    for _ in range(50):
        start = at + random.randint(1, longest)
        at = start + random.randint(1, longest)
        ranges.put(start, at, None)
    assert unpack(pack(ranges, origin), origin) == ranges


def test_a_thousand_gaps_take_a_kibibyte() -> None:
    random = Random(1)
    at, ranges = 0, RangeMap[None]()
    for _ in range(1_000):
        start = at + random.randint(1, 3)
        at = start + random.randint(1, 30)
        ranges.put(start, at, None)
    assert len(pack(ranges, 0)) <= 1_024
    assert pack(RangeMap(), 0) == b""


def test_the_floor_rises_as_far_as_it_can() -> None:
    position = GroupPosition(0, 10)
    position.settle(3, 5)
    assert (position.floor, list(position.settled)) == (0, [(3, 5, None)])
    position.settle(0, 2)
    assert position.floor == 2
    position.settle(2, 3)
    assert (position.floor, len(position.settled), position.unsettled) == (5, 0, 5)
