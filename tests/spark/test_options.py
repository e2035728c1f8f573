"""Options of the data source, and what is read with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import ConfigError, LocalProtocolError
from txmq_spark.columns import Span
from txmq_spark.options import Reading, reading, spans, writing

URL = {"url": "txmq://127.0.0.1:7650"}
TOPIC = URL | {"topic": "orders"}


def test_earliest_is_the_first_message_that_is_kept() -> None:
    wanted = reading(TOPIC | {"startingOffsets": json.dumps({"orders": {"1": 2}})})
    assert spans(wanted, {"orders": [9, 9]}, {"orders": [5, 5]}) == [
        Span("orders", 0, 5, 9),
        Span("orders", 1, 2, 9),
    ]


def test_everything_published_is_read_unless_offsets_say_otherwise() -> None:
    wanted = reading(
        TOPIC | {"startingOffsets": '{"orders": {"1": 4}}', "endingOffsets": '{"orders": {"0": 7}}'}
    )
    assert spans(wanted, {"orders": [9, 10, 0]}) == [
        Span("orders", 0, 0, 7),
        Span("orders", 1, 4, 10),
    ]
    assert spans(
        reading(TOPIC | {"startingOffsets": "earliest", "endingOffsets": "latest"}), {"orders": [3]}
    ) == [Span("orders", 0, 0, 3)]


def test_several_topics_are_read_together() -> None:
    wanted = reading(URL | {"topic": "orders, refunds"})
    assert wanted.topics == ("orders", "refunds")


ENDS = st.dictionaries(
    st.sampled_from(["a", "b"]), st.lists(st.integers(0, 50), max_size=4), min_size=1
)


@given(ENDS, st.integers(1, 20))
def test_pieces_cover_every_offset_once_in_as_many_tasks_as_asked_for(
    ends: dict[str, list[int]], least: int
) -> None:
    found = spans(Reading("u", tuple(ends), least_partitions=least), ends)
    covered = [
        (span.topic, span.partition, offset)
        for span in found
        for offset in range(span.start, span.end)
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
    found = spans(reading(TOPIC | {"minPartitions": "4"}), {"orders": [100]})
    assert [(span.start, span.end) for span in found] == [(0, 25), (25, 50), (50, 75), (75, 100)]


BAD: list[tuple[dict[str, str], str]] = [
    ({"topic": "orders"}, "url"),
    (URL, "either a topic"),
    (TOPIC | {"letters": "billing"}, "either a topic"),
    (TOPIC | {"startingOffset": "earliest"}, "no such option"),
    (TOPIC | {"startingOffsets": "first"}, "names no offsets"),
    (TOPIC | {"startingOffsets": '{"orders": {"0": -1}}'}, "names no offsets"),
    (TOPIC | {"endingOffsets": '{"orders": 4}'}, "names no offsets"),
    (TOPIC | {"endingOffsets": '{"orders": {"0": 18446744073709551616}}'}, "names no offsets"),
    (TOPIC | {"endingOffsets": "[" * 100_000}, "names no offsets"),
    (TOPIC | {"minPartitions": "many"}, "no number of partitions"),
    (TOPIC | {"minPartitions": "0"}, "no number of partitions"),
    (TOPIC | {"minPartitions": "²"}, "no number of partitions"),
]


@pytest.mark.parametrize(("options", "says"), BAD)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        reading(options)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "file:///etc/passwd", "a b", "", ".hidden", "a" * 128]
)
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises((LocalProtocolError, ConfigError)):
        reading(URL | {"topic": name})
    with pytest.raises((LocalProtocolError, ConfigError)):
        reading(URL | {"letters": name})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"endingOffsets": '{"orders": {"0": 10}}'}, "ends at 9, not at 10"),
        ({"endingOffsets": '{"orders": {"1": 0}}'}, "orders/1 is none"),
        ({"startingOffsets": '{"orders": {"-1": 0}}'}, "orders/-1 is none"),
        ({"startingOffsets": '{"refunds": {"0": 0}}'}, "refunds is none"),
    ],
)
def test_offsets_that_a_topic_does_not_have_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        spans(reading(TOPIC | given), {"orders": [9]})


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
        writing(options)
