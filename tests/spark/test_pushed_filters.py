"""Filters that the reader applies itself: which, and that they change no result."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)

from tests.spark.consuming import let_die
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.data_source import LETTER_TYPES, MESSAGE_TYPES
from txmq_spark.source.letter_reading import FilteringLetterReader, LetterReader
from txmq_spark.source.message_reading import FilteringMessageReader
from txmq_spark.source.options import parse_read_options
from txmq_spark.source.pushed_filters import (
    EPOCH,
    PushedLetters,
    Span,
    push_letter_filters,
    push_message_filters,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    import txmq

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
NOON = EPOCH + timedelta(hours=12)
RANGES = [OffsetRange(topic, n, 0, 100) for topic in ("orders", "refunds") for n in range(3)]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([EqualTo(("topic",), "orders"), EqualTo(("partition",), 1)], [("orders", 1, 0, 100)]),
        (
            [In(("topic",), ("refunds", "x")), GreaterThanOrEqual(("partition",), 2)],
            [("refunds", 2, 0, 100)],
        ),
        (
            [
                EqualNullSafe(("topic",), "orders"),
                In(("partition",), (0, 9)),
                GreaterThan(("offset",), 9),
                LessThanOrEqual(("offset",), 19),
            ],
            [("orders", 0, 10, 20)],
        ),
        ([EqualTo(("topic",), "orders"), EqualTo(("topic",), "refunds")], []),
        ([LessThan(("partition",), 0), IsNotNull(("offset",))], []),
    ],
)
def test_places_of_messages_are_ranges_of_offsets(
    filters: list[Filter], left: list[tuple[Any, ...]]
) -> None:
    pushed, rest = push_message_filters(filters)
    assert (pushed.apply(RANGES), rest) == ([OffsetRange(*one) for one in left], [])


def test_times_of_messages_narrow_the_offsets_and_are_judged_again() -> None:
    wanted: list[Filter] = [
        GreaterThan(("stored_at",), NOON),
        LessThan(("stored_at",), NOON.astimezone(timezone(timedelta(hours=2)))),
    ]
    pushed, rest = push_message_filters(wanted)
    assert pushed.stored == Span(12 * 3_600 * 10**6 + 1, 12 * 3_600 * 10**6)
    assert rest == wanted


SPARKS: list[Filter] = [
    EqualTo(("key",), "k"),
    IsNull(("topic",)),
    IsNotNull(("key",)),
    Not(EqualTo(("topic",), "orders")),
    EqualNullSafe(("topic",), None),
    EqualTo(("headers", "topic"), "orders"),
    StringContains(("topic",), "ord"),
    In(("partition",), (1, None)),
    EqualTo(("offset",), True),
    GreaterThan(("stored_at",), datetime(2026, 1, 1)),  # noqa: DTZ001  # without a zone
]


@pytest.mark.parametrize("one", SPARKS)
def test_other_filters_are_left_to_spark(one: Filter) -> None:
    pushed, rest = push_message_filters([one])
    assert rest[0] is one
    assert pushed.apply(RANGES) == RANGES


def test_properties_of_letters_are_a_selection_of_the_broker() -> None:
    filters: list[Filter] = [
        EqualTo(("origin_topic",), "orders"),
        EqualTo(("key",), "k"),
        EqualTo(("key",), "other"),
        EqualTo(("error_type",), "shop.Bad"),
        EqualTo(("fingerprint",), "f" * 257),  # longer than a selection may have
        GreaterThanOrEqual(("dead_at",), NOON),
        EqualTo(("partition",), 2),
        In(("tag",), ("a", "b")),
        In(("state",), ("open", "abandoned")),
        EqualTo(("tag",), ""),
        StringContains(("error_text",), "x"),
    ]
    pushed, rest = push_letter_filters(filters)
    assert rest == [filters[2], filters[4], filters[5], filters[10]]
    no_name: list[Filter] = [EqualTo(("topic",), "no name")]
    assert push_letter_filters(no_name) == (PushedLetters(), no_name)
    assert pushed.select == {
        "topic": "orders",
        "key": "k",
        "error_type": "shop.Bad",
        "died_from": 12 * 3_600 * 10**6,
        "died_before": 253_402_300_799_999_999,
    }
    assert pushed.states == frozenset({"open", "abandoned"})
    assert not pushed.has({"partition": 2, "tag": "a"})  # and "" besides
    assert not pushed.has({"partition": 1, "tag": "a"})
    assert push_letter_filters(filters[6:8])[0].has({"partition": 2, "tag": "b"})
    assert not push_letter_filters(filters[6:8])[0].has({"partition": 2, "tag": None})


def test_a_selection_by_an_option_is_narrowed_by_other_properties_only() -> None:
    filters: list[Filter] = [EqualTo(("key",), "other"), EqualTo(("topic",), "t")]
    filters.append(LessThan(("dead_at",), NOON))
    pushed, rest = push_letter_filters(filters, {"key": "k", "died_from": 5})
    assert pushed.select == {"key": "k", "died_from": 5, "topic": "t"}
    assert rest == [filters[0], filters[2]]


# With a broker, and by Spark.


@pytest.fixture
def dead(client: txmq.Client, topic: str) -> str:
    """A topic and a group with twelve letters of three keys; letter 0 is abandoned."""
    client.call("topic.create", name=topic, partitions=3)
    for n in range(12):
        tag = "even" if n % 2 == 0 else None
        client.send(topic, b"%d" % n, key=f"k{n % 3}", tag=tag)
    let_die(client, topic, topic, [b"%d" % n for n in range(12)], "concurrent")
    [first] = [one for one in client.letters(topic, bodies=True) if one.body == b"0"]
    place = (first.topic, first.partition, first.offset)
    client.call("dlq.abandon", group=topic, letters=[place], reason="test")
    return topic


def found(reader: LetterReader) -> list[int]:
    return sorted(
        int(row["body"])
        for task in reader.partitions()
        for batch in reader.read(task)
        for row in batch.to_pylist()
    )


FOUND: list[tuple[str, list[Filter], set[int]]] = [
    ("", [EqualTo(("key",), "k1")], {1, 4, 7, 10}),
    ("", [EqualTo(("key",), "k1"), EqualTo(("tag",), "even")], {4, 10}),
    ("", [EqualTo(("topic",), "nowhere")], set()),
    ("", [EqualTo(("state",), "open")], set(range(1, 12))),
    ("", [EqualTo(("state",), "abandoned")], set()),
    ("open,abandoned", [], set(range(12))),
    ("open,abandoned", [EqualTo(("state",), "abandoned")], {0}),
    ("abandoned", [EqualTo(("key",), "k0")], {0}),
    ("", [GreaterThan(("dead_at",), NOON)], set(range(1, 12))),
    ("", [LessThan(("dead_at",), NOON)], set()),
    ("", [EqualTo(("attempts",), 1), In(("tag",), ("even", "x"))], {2, 4, 6, 8, 10}),
]


def test_a_reader_finds_the_letters_that_filters_leave(broker: str, dead: str) -> None:
    for states, filters, expected in FOUND:
        options = {"url": broker, "letters": dead} | ({"states": states} if states else {})
        reader = FilteringLetterReader(parse_read_options(options), LETTER_TYPES.names)
        reader.pushFilters(filters)
        assert found(reader) == sorted(expected), filters
    options = {"url": broker, "letters": dead, "select": '{"key": "k1", "min_attempts": 1}'}
    assert found(LetterReader(parse_read_options(options), LETTER_TYPES.names)) == [1, 4, 7, 10]


def letters(spark: SparkSession, broker: str, group: str, condition: str) -> DataFrame:
    reader = spark.read.format("txmq").option("url", broker).option("letters", group)
    reader = reader.option("states", "open,abandoned").option("pushFilters", "true")
    return reader.load().where(condition)


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    spark.conf.set(PUSHDOWN, "true")
    yield spark
    spark.conf.set(PUSHDOWN, "false")


def test_spark_hands_filters_to_both_readers_where_a_frame_asks_for_it(
    pushing: SparkSession, broker: str, dead: str
) -> None:
    condition = "dead_at > timestamp'2020-01-01 00:00:00' and key <=> 'k0' and tag = 'even'"
    rows = letters(pushing, broker, dead, condition).select("body").collect()
    assert sorted(int(row.body) for row in rows) == [0, 6]
    by_key = letters(pushing, broker, dead, "key <=> 'k1'")
    reader = pushing.read.format("txmq").option("url", broker).option("topic", dead)
    frame = reader.option("pushFilters", "true").load()
    for chosen in (by_key, frame.where("partition = 1 and offset > 1")):
        plan = chosen._jdf.queryExecution().executedPlan().toString()
        assert "BatchScan" in plan
        assert "Filter (" not in plan
    # Spark would read both sides with the filters of one of them.
    plain = reader.option("pushFilters", "false").load()
    both = plain.where("partition = 0").unionAll(plain.where("partition = 1"))
    assert both.count() == plain.where("partition < 2").count() < plain.count()


def test_a_large_number_of_letters_is_read_by_several_tasks(
    broker: str, dead: str, client: txmq.Client
) -> None:
    options = {"url": broker, "letters": dead, "minPartitions": "4"}
    everything = FilteringLetterReader(parse_read_options(options), LETTER_TYPES.names)
    by_error = FilteringLetterReader(parse_read_options(options), LETTER_TYPES.names)
    [one, *_rest] = client.call("dlq.list", group=dead)["letters"]
    rest = by_error.pushFilters([EqualTo(("fingerprint",), one["fingerprint"])])
    assert list(rest) == []
    planned = [(reader, reader.partitions()) for reader in (everything, by_error)]
    client.send(dead, b"99", key="later")
    let_die(client, dead, dead, [b"99"], "concurrent")
    for reader, tasks in planned:
        batches = [batch for task in tasks for batch in reader.read(task)]
        bodies = [body for batch in batches for body in batch.column("body").to_pylist()]
        assert len(tasks) == 4
        assert sorted(map(int, bodies)) == list(range(1, 12))


def test_messages_by_time_are_read_from_the_offsets_of_that_time(
    broker: str, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    for n in range(4):
        client.send(topic, b"%d" % n)
    stored = [one["stored_at"] for one in client.call("message.find", topic=topic)["messages"]]
    options = parse_read_options({"url": broker, "topic": topic})
    reader = FilteringMessageReader(options, MESSAGE_TYPES.names)
    at = EPOCH + timedelta(microseconds=stored[2])
    reader.pushFilters([GreaterThanOrEqual(("stored_at",), at)])
    [task] = reader.partitions()
    assert (task.value.work.offsets.start, task.value.work.offsets.end) == (
        stored.index(stored[2]),
        4,
    )
