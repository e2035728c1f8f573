"""Partitions over several brokers: numbered through, and the same for a key whoever is
away.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.client.protocol.sender.partition_map import PartitionMap, Slot
from txmq.errors import BrokerUnavailable, ConfigError, LocalProtocolError
from txmq.model.keys import partition_of


def never(broker: int, topic: str) -> int:
    raise BrokerUnavailable(f"broker {broker} was asked for {topic}")


def test_partitions_are_numbered_through() -> None:
    places = PartitionMap(3, never, {"t": (2, 0, 1)})
    assert [places.chosen("t", None, number) for number in range(3)] == [
        Slot(0, 0),
        Slot(0, 1),
        Slot(2, 0),
    ]
    for wrong in (3, -1, True, 1.0):
        with pytest.raises(LocalProtocolError):
            places.chosen("t", None, wrong)  # type: ignore[arg-type]  # what callers may get wrong


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    key=st.text(min_size=1, max_size=8),
)
def test_a_key_goes_to_the_partition_of_its_hash_among_all(counts: list[int], key: str) -> None:
    places = PartitionMap(len(counts), never, {"t": counts})
    slot = places.chosen("t", key)
    assert slot is not None
    assert sum(counts[: slot.broker]) + slot.partition == partition_of(key, sum(counts))
    assert slot.partition < counts[slot.broker]


def test_brokers_are_asked_once_and_only_for_keys() -> None:
    asked: Counter[tuple[int, str]] = Counter()

    def count(broker: int, topic: str) -> int:
        asked[broker, topic] += 1
        return 4

    places = PartitionMap(2, count)
    assert places.chosen("t", None) is None
    assert not asked
    assert places.chosen("t", "k") == places.chosen("t", "k")
    assert asked == {(0, "t"): 1, (1, "t"): 1}
    with pytest.raises(BrokerUnavailable):
        PartitionMap(2, never).chosen("t", "k")


def test_a_partitioner_sees_all_partitions_and_may_have_no_opinion() -> None:
    seen: list[Any] = []

    def partitioner(topic: str, key: str | None, partitions: int) -> int | None:
        seen.append((topic, key, partitions))
        return 5 if key == "odd" else None

    places = PartitionMap(2, never, {"t": (4, 4)}, partitioner)
    assert places.chosen("t", "odd") == Slot(1, 1)
    assert places.chosen("t", None) is None
    assert places.chosen("t", "even") == PartitionMap(2, never, {"t": (4, 4)}).chosen("t", "even")
    assert seen == [("t", "odd", 8), ("t", None, 8), ("t", "even", 8)]


@pytest.mark.parametrize("counts", [(1,), (1, 2, 3), (0, 0), (1, -1), (1, 2.0)])
def test_a_map_that_cannot_be_meant_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        PartitionMap(2, never, {"t": counts})
