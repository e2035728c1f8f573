"""Options of the data source, and the offsets that they select."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import ConfigError, LocalProtocolError
from txmq_spark.arrow_messages import OffsetRange
from txmq_spark.source_options import (
    ReadOptions,
    parse_read_options,
    parse_write_options,
    plan_ranges,
)

URL = {"url": "txmq://127.0.0.1:7650"}
TOPIC = URL | {"topic": "orders"}


def test_earliest_is_the_first_offset_that_retention_has_left() -> None:
    wanted = parse_read_options(TOPIC | {"startingOffsets": json.dumps({"orders": {"1": 2}})})
    assert plan_ranges(wanted, {"orders": [9, 9]}, {"orders": [5, 5]}) == [
        OffsetRange("orders", 0, 5, 9),
        OffsetRange("orders", 1, 2, 9),
    ]


def test_all_published_messages_are_read_unless_offsets_are_given() -> None:
    wanted = parse_read_options(
        TOPIC | {"startingOffsets": '{"orders": {"1": 4}}', "endingOffsets": '{"orders": {"0": 7}}'}
    )
    assert plan_ranges(wanted, {"orders": [9, 10, 0]}) == [
        OffsetRange("orders", 0, 0, 7),
        OffsetRange("orders", 1, 4, 10),
    ]
    assert plan_ranges(
        parse_read_options(TOPIC | {"startingOffsets": "earliest", "endingOffsets": "latest"}),
        {"orders": [3]},
    ) == [OffsetRange("orders", 0, 0, 3)]


def test_several_topics_are_read_together() -> None:
    wanted = parse_read_options(URL | {"topic": "orders, refunds"})
    assert wanted.topics == ("orders", "refunds")


ENDS = st.dictionaries(
    st.sampled_from(["a", "b"]), st.lists(st.integers(0, 50), max_size=4), min_size=1
)


@given(ENDS, st.integers(1, 20))
def test_ranges_cover_every_offset_once_in_as_many_tasks_as_requested(
    ends: dict[str, list[int]], least: int
) -> None:
    found = plan_ranges(ReadOptions("u", tuple(ends), min_partitions=least), ends)
    covered = [
        (offsets.topic, offsets.partition, offset)
        for offsets in found
        for offset in range(offsets.start, offsets.end)
    ]
    every = [
        (name, number, n)
        for name, sizes in ends.items()
        for number, end in enumerate(sizes)
        for n in range(end)
    ]
    assert covered == every
    assert len(found) <= max(least + sum(map(len, ends.values())), 1)


def test_a_large_partition_is_cut_where_more_tasks_are_wanted() -> None:
    found = plan_ranges(parse_read_options(TOPIC | {"minPartitions": "4"}), {"orders": [100]})
    assert [(offsets.start, offsets.end) for offsets in found] == [
        (0, 25),
        (25, 50),
        (50, 75),
        (75, 100),
    ]


BAD: list[tuple[dict[str, str], str]] = [
    ({"topic": "orders"}, "url"),
    (URL, "either a topic"),
    (TOPIC | {"letters": "billing"}, "either a topic"),
    (TOPIC | {"startingOffset": "earliest"}, "no such option"),
    (TOPIC | {"startingOffsets": "first"}, "invalid offsets"),
    (TOPIC | {"startingOffsets": '{"orders": {"0": -1}}'}, "invalid offsets"),
    (TOPIC | {"endingOffsets": '{"orders": 4}'}, "invalid offsets"),
    (TOPIC | {"endingOffsets": '{"orders": {"0": 18446744073709551616}}'}, "invalid offsets"),
    (TOPIC | {"endingOffsets": "[" * 100_000}, "invalid offsets"),
    (TOPIC | {"minPartitions": "many"}, "invalid number of partitions"),
    (TOPIC | {"minPartitions": "0"}, "invalid number of partitions"),
    (TOPIC | {"minPartitions": "²"}, "invalid number of partitions"),
]


@pytest.mark.parametrize(("options", "says"), BAD)
def test_invalid_options_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_read_options(options)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "file:///etc/passwd", "a b", "", ".hidden", "a" * 128]
)
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises((LocalProtocolError, ConfigError)):
        parse_read_options(URL | {"topic": name})
    with pytest.raises((LocalProtocolError, ConfigError)):
        parse_read_options(URL | {"letters": name})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"endingOffsets": '{"orders": {"0": 10}}'}, "ends at 9, not at 10"),
        ({"endingOffsets": '{"orders": {"1": 0}}'}, "orders/1 is not"),
        ({"startingOffsets": '{"orders": {"-1": 0}}'}, "orders/-1 is not"),
        ({"startingOffsets": '{"refunds": {"0": 0}}'}, "refunds is not"),
    ],
)
def test_offsets_that_a_topic_does_not_have_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_ranges(parse_read_options(TOPIC | given), {"orders": [9]})


@pytest.mark.parametrize(
    "options",
    [
        {"topic": "orders"},
        TOPIC | {"idempotency_key": " "},
        TOPIC | {"mode": "x"},
        URL | {"topic": "a/b"},
    ],
)
def test_a_write_with_other_options_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, LocalProtocolError)):
        parse_write_options(options)
