"""Ranges of offsets for tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import ConfigError
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.offset_ranges import (
    DataLoss,
    LogName,
    Survey,
    TopicBounds,
    batch_ranges,
    cut_ranges,
)
from txmq_spark.source.options import ReadOptions, parse_read_options

LOG = LogName("log", "")
TOPIC = {"url": "txmq://127.0.0.1:7650", "topic": "orders"}


def survey(
    ends: Mapping[str, Sequence[int]],
    firsts: Mapping[str, Sequence[int]] | None = None,
    size: int = 0,
) -> Survey:
    known = firsts or {}
    return Survey(
        LOG,
        {
            name: TopicBounds(7, known.get(name, [0] * len(found)), found, size)
            for name, found in ends.items()
        },
    )


def stored_at_once(_topic: str, _partition: int, first: int, end: int, at: int) -> int:
    """Offset n was stored at 1,000 n microseconds."""
    return min(max(-(-at // 1_000), first), end)


def ranges(options: Mapping[str, str], found: Survey) -> list[OffsetRange]:
    return batch_ranges(parse_read_options(options), found, stored_at_once)


def test_earliest_is_the_first_offset_that_retention_has_left() -> None:
    assert ranges(TOPIC, survey({"orders": [9, 9]}, {"orders": [5, 5]})) == [
        OffsetRange("orders", 0, 5, 9),
        OffsetRange("orders", 1, 5, 9),
    ]


def test_offsets_that_retention_has_removed_are_an_error_or_left_out() -> None:
    options = TOPIC | {"startingOffsets": json.dumps({"orders": {"1": 2}})}
    found = survey({"orders": [9, 9]}, {"orders": [5, 5]})
    with pytest.raises(DataLoss, match="orders/1: retention has removed offsets 2 to 4"):
        ranges(options, found)
    assert ranges(options | {"failOnDataLoss": "false"}, found)[1] == OffsetRange("orders", 1, 5, 9)


def test_all_published_messages_are_read_unless_offsets_are_given() -> None:
    options = TOPIC | {
        "startingOffsets": '{"orders": {"1": 4}}',
        "endingOffsets": '{"orders": {"0": 7}}',
    }
    assert ranges(options, survey({"orders": [9, 10, 0]})) == [
        OffsetRange("orders", 0, 0, 7),
        OffsetRange("orders", 1, 4, 10),
        OffsetRange("orders", 2, 0, 0),
    ]


def test_times_are_milliseconds_or_iso_8601_and_end_before_the_last() -> None:
    for start, end in (("3", "6"), ("1970-01-01T00:00:00.003Z", "1970-01-01T01:00:00.006+01:00")):
        options = TOPIC | {"startingTimestamp": start, "endingTimestamp": end}
        assert ranges(options, survey({"orders": [9]})) == [OffsetRange("orders", 0, 3, 6)]


ENDS = st.dictionaries(
    st.sampled_from(["a", "b"]), st.lists(st.integers(0, 50), max_size=4), min_size=1
)


@given(ENDS, st.integers(1, 20), st.integers(1, 500), st.integers(0, 2_000))
def test_ranges_cover_every_offset_once_in_as_many_tasks_as_requested(
    ends: dict[str, list[int]], least: int, task_bytes: int, size: int
) -> None:
    options = ReadOptions("u", tuple(ends), min_partitions=least, partition_bytes=task_bytes)
    found = survey(ends, size=size)
    tasks = cut_ranges(batch_ranges(options, found, stored_at_once), found, options)
    covered = [
        (offsets.topic, offsets.partition, offset)
        for offsets, _log, _topic_id in tasks
        for offset in range(offsets.start, offsets.end)
    ]
    every = [
        (name, number, n)
        for name, sizes in ends.items()
        for number, end in enumerate(sizes)
        for n in range(end)
    ]
    assert covered == every
    assert len(tasks) >= min(least, len(every)) or len(tasks) * 2 > least
    for offsets, _log, _topic_id in tasks:
        length = (offsets.end - offsets.start) * found.topics[offsets.topic].message_bytes
        assert length <= task_bytes or offsets.end - offsets.start == 1


def test_a_large_partition_is_cut_by_number_and_by_size() -> None:
    found = survey({"orders": [100]}, size=100 * 1_000)
    for name, value in (("minPartitions", "4"), ("maxPartitionBytes", "25000")):
        options = parse_read_options(TOPIC | {name: value})
        tasks = cut_ranges(batch_ranges(options, found, stored_at_once), found, options)
        assert [(offsets.start, offsets.end) for offsets, _log, _topic in tasks] == [
            (0, 25),
            (25, 50),
            (50, 75),
            (75, 100),
        ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"endingOffsets": '{"orders": {"0": 10}}'}, "ends at 9, not at 10"),
        ({"startingOffsets": '{"orders": {"0": 10}}'}, "ends at 9, not at 10"),
        ({"endingOffsets": '{"orders": {"1": 0}}'}, "orders/1 is not"),
        ({"startingOffsets": '{"orders": {"-1": 0}}'}, "orders/-1 is not"),
        ({"startingOffsets": '{"refunds": {"0": 0}}'}, "refunds is not"),
    ],
)
def test_offsets_that_a_topic_does_not_have_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ranges(TOPIC | given, survey({"orders": [9]}))
