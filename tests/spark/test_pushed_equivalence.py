"""Pushed filters with odd literals change no result: random ones, by a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import eq, ge, gt, le, lt
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    DataSourceReader,
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
    StringStartsWith,
)

import txmq
from tests.spark.consuming import drain
from txmq.testing.wait import PATIENCE_S
from txmq_spark.source.data_source import LETTER_TYPES, MESSAGE_TYPES
from txmq_spark.source.letter_reading import FilteringLetterReader, LetterReader
from txmq_spark.source.message_reading import FilteringMessageReader, MessageReader
from txmq_spark.source.options import parse_read_options
from txmq_spark.source.pushed_filters import EPOCH

Row = dict[str, Any]
TOPIC: Final = "t-pushed-equivalence"
KEYS: Final = ("k0", "K0", "k0 ", "", None, "k\0", "\N{GREEK SMALL LETTER ALPHA}", "o'k\\%_")
TAGS: Final = (None, "", "even", "\0", "'")
MESSAGES: Final = 24
ABANDONED: Final = 5
COMPARED: Final[dict[Any, Callable[[Any, Any], bool]]] = {
    EqualTo: eq,
    GreaterThan: gt,
    GreaterThanOrEqual: ge,
    LessThan: lt,
    LessThanOrEqual: le,
}
SAYS: Final = COMPARED | {
    In: lambda has, values: has in values,
    StringStartsWith: lambda has, begun: has.startswith(begun),
}
TEXTS: Final = ("topic", "origin_topic", "key", "tag", "error_type", "fingerprint", "state")
NUMBERS: Final = ("partition", "offset", "origin_offset", "attempts", "attempt", "replays")
TIMES: Final = ("dead_at", "stored_at", "first_failed_at")
OF_MESSAGES: Final = frozenset({"topic", "key", "tag", "partition", "offset", "stored_at"})


@pytest.fixture(scope="module")
def made(broker: str) -> str:
    """The URL of the broker, which has a topic and as many letters of a group."""
    with txmq.connect(broker, service="tests", timeout=PATIENCE_S) as client:
        client.call("topic.create", name=TOPIC, partitions=3)
        for n in range(MESSAGES):
            client.send(TOPIC, b"%d" % n, key=KEYS[n % len(KEYS)], tag=TAGS[n % len(TAGS)])
        drain(client, TOPIC, TOPIC, lambda _message: False, "concurrent", reason=why)
        letters = client.call("dlq.list", group=TOPIC)["letters"][:ABANDONED]
        places = [(one["topic"], one["partition"], one["offset"]) for one in letters]
        client.call("dlq.abandon", group=TOPIC, letters=places, reason="test")
    return broker


def why(message: txmq.ReceivedMessage) -> str:
    return "ab"[len(message.body) - 1]


def read(reader: DataSourceReader) -> list[Row]:
    tasks: Any = reader.partitions()
    return [
        row
        for task in tasks
        for batch in reader.read(task)
        for row in batch.to_pylist()  # type: ignore[union-attr] # of Arrow
    ]


def judged(one: Filter, row: Row) -> bool | None:
    """Return what SQL says of a filter; None = unknown."""
    if isinstance(one, Not):
        found = judged(one.child, row)
        return None if found is None else not found
    [column] = one.attribute  # type: ignore[attr-defined] # all others have one
    has = row[column]
    if isinstance(one, IsNull | IsNotNull):
        return (has is None) == isinstance(one, IsNull)
    value = one.value  # type: ignore[attr-defined]
    if isinstance(one, EqualNullSafe):
        return bool(has == value)
    if has is None or (isinstance(one, In) and None in value and has not in value):
        return None
    return bool(SAYS[type(one)](_comparable(has), _comparable(value)))


def _comparable(value: Any) -> Any:
    """Return texts as Spark compares them."""
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return value.encode() if isinstance(value, str) else value


def left_by(filters: Iterable[Filter], rows: Iterable[Row]) -> list[str]:
    return sorted(
        f"{row['topic']}/{row['partition']}/{row['offset']}"
        for row in rows
        if all(judged(one, row) for one in filters)
    )


def filters_of(column: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Filter]:
    """Return filters of a column, as Spark makes them."""
    path = (column,)
    compared = [values.map(partial(kind, path)) for kind in COMPARED]
    plain = st.one_of(
        *compared,
        (values | st.none()).map(lambda value: EqualNullSafe(path, value)),
        st.lists(values | st.none(), max_size=3).map(lambda found: In(path, tuple(found))),
        st.sampled_from([IsNull(path), IsNotNull(path)]),
    )
    if column in TEXTS:
        plain |= values.map(lambda value: StringStartsWith(path, value))
    return plain | plain.map(Not)


ODD_TEXTS = st.sampled_from(
    [
        *KEYS[:4],
        *KEYS[5:],
        "even",
        "\0",
        "'",
        "x" * 2_000,
        "open",
        "abandoned",
        TOPIC,
        "dead-lettered",
    ]
)
ODD_NUMBERS = st.sampled_from([-(1 << 63), -1, 0, 1, 2, 3, 1 << 31, (1 << 63) - 1])


def lists_of(rows: list[Row], columns: Iterable[str]) -> st.SearchStrategy[list[Filter]]:
    """Return lists of filters with values of these rows, and odd ones."""
    odd_times = [
        EPOCH,
        datetime.min.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
        *(rows[0]["stored_at"] + timedelta(microseconds=n) for n in (-1, 0, 1)),
    ]
    kinds: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(TEXTS, ODD_TEXTS),
        **dict.fromkeys(NUMBERS, ODD_NUMBERS),
        **dict.fromkeys(TIMES, st.sampled_from(odd_times)),
    }
    one_each = [
        filters_of(
            column,
            kinds[column]
            | st.sampled_from([row[column] for row in rows if row[column] is not None] or [""]),
        )
        for column in columns
    ]
    return st.lists(st.one_of(one_each), max_size=4)


def test_random_filters_leave_the_letters_that_sql_leaves(made: str) -> None:
    names = LETTER_TYPES.names
    options = {
        states: parse_read_options(
            {"url": made, "letters": TOPIC} | ({"states": states} if states else {})
        )
        for states in ("", "open,abandoned", "abandoned")
    }
    everything = {states: read(LetterReader(given, names)) for states, given in options.items()}
    assert [len(rows) for rows in everything.values()] == [
        MESSAGES - ABANDONED,
        MESSAGES,
        ABANDONED,
    ]
    some = everything["open,abandoned"]

    @settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.sampled_from(sorted(options)), lists_of(some, (*TEXTS, *NUMBERS, *TIMES)))
    def compare(states: str, filters: list[Filter]) -> None:
        reader = FilteringLetterReader(options[states], names)
        rest = list(reader.pushFilters(filters))
        assert left_by(rest, read(reader)) == left_by(filters, everything[states])

    compare()


def test_random_filters_leave_the_messages_that_sql_leaves(made: str) -> None:
    options = parse_read_options({"url": made, "topic": TOPIC})
    names = MESSAGE_TYPES.names
    rows = read(MessageReader(options, names))
    assert len(rows) == MESSAGES

    @settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
    @given(lists_of(rows, sorted(OF_MESSAGES)))
    def compare(filters: list[Filter]) -> None:
        reader = FilteringMessageReader(options, names)
        rest = list(reader.pushFilters(filters))
        assert left_by(rest, read(reader)) == left_by(filters, rows)

    compare()
