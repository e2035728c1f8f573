"""Partitions numbered across several brokers, and the same for a key while brokers are
away.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.client.protocol.sender.routing import BrokerPartition, PartitionMap
from txmq.errors import BrokerUnavailable, ConfigError, LocalProtocolError
from txmq.model.keys import partition_of


def never(topic: str) -> dict[int, int]:
    raise BrokerUnavailable(f"brokers were asked for {topic}")


def test_partitions_are_numbered_across_brokers() -> None:
    places = PartitionMap(3, never, {"t": (2, 0, 1)})
    assert [places.choose("t", None, number) for number in range(3)] == [
        BrokerPartition(0, 0),
        BrokerPartition(0, 1),
        BrokerPartition(2, 0),
    ]
    for wrong in (3, -1, True, 1.0):
        with pytest.raises(LocalProtocolError):
            places.choose("t", None, wrong)  # type: ignore[arg-type]  # what callers may get wrong


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    key=st.text(min_size=1, max_size=8),
)
def test_a_key_goes_to_the_partition_of_its_hash_among_all(counts: list[int], key: str) -> None:
    places = PartitionMap(len(counts), never, {"t": counts})
    slot = places.choose("t", key)
    assert slot is not None
    assert sum(counts[: slot.broker]) + slot.partition == partition_of(key, sum(counts))
    assert slot.partition < counts[slot.broker]


def test_brokers_are_asked_once_and_only_about_messages_with_keys() -> None:
    asked: Counter[str] = Counter()

    def look_up(topic: str) -> dict[int, int]:
        asked[topic] += 1
        return {0: 4, 1: 4}

    places = PartitionMap(2, look_up)
    assert places.choose("t", None) is None
    assert not asked
    assert places.choose("t", "k") == places.choose("t", "k")
    assert asked == {"t": 1}
    with pytest.raises(BrokerUnavailable):
        PartitionMap(2, never).choose("t", "k")


def test_a_partitioner_chooses_among_all_partitions_or_leaves_the_choice() -> None:
    seen: list[Any] = []

    def partitioner(topic: str, key: str | None, partitions: int) -> int | None:
        seen.append((topic, key, partitions))
        return 5 if key == "odd" else None

    places = PartitionMap(2, never, {"t": (4, 4)}, partitioner)
    assert places.choose("t", "odd") == BrokerPartition(1, 1)
    assert places.choose("t", None) is None
    assert places.choose("t", "even") == PartitionMap(2, never, {"t": (4, 4)}).choose("t", "even")
    assert seen == [("t", "odd", 8), ("t", None, 8), ("t", "even", 8)]


@pytest.mark.parametrize("counts", [(1,), (1, 2, 3), (0, 0), (1, -1), (1, 2.0)])
def test_an_invalid_partition_map_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        PartitionMap(2, never, {"t": counts})
