"""Filters of a query that the reader applies itself: as ranges of offsets, as a
selection of letters at the broker, or before rows become Arrow.

A filter that is applied in part, or not at all, is returned to Spark, which evaluates
it after the read. So a filter never changes which rows the source has. Literals come as
Python values: text, whole numbers, times with a zone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from txmq.model import limits
from txmq.model.message import is_name
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.options import NO_SELECTION

MESSAGE_COLUMNS: Final = frozenset({"topic", "partition", "offset", "message_id", "body"})
EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
MICROSECOND: Final = timedelta(microseconds=1)
END: Final = limits.SEQUENCE + 1
SHORT: Final = 256  # characters of an error type or fingerprint in a selection


class Span(NamedTuple):
    """Whole numbers from `start` up to `end`, excluded."""

    start: int = 0
    end: int = END

    def intersect(self, other: Span) -> Span:
        """Return the numbers that are in both."""
        return Span(max(self.start, other.start), min(self.end, other.end))


ALL: Final = Span()
Values = frozenset[Any] | Span


class PushedMessages(NamedTuple):
    """Messages that filters leave to be read; None = all of them.

    `stored` are microseconds. It is applied to the offsets, which is not exact.
    """

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    partition_span: Span = ALL
    offsets: Span = ALL
    stored: Span = ALL

    def apply(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        """Return what these filters leave of ranges; times are left to the caller."""
        return [
            one._replace(
                start=max(one.start, self.offsets.start), end=min(one.end, self.offsets.end)
            )
            for one in ranges
            if self.has_partition(one.topic, one.partition)
        ]

    def has_partition(self, topic: str, partition: int) -> bool:
        """Return True if filters leave some of the partition."""
        return (
            (self.topics is None or topic in self.topics)
            and (self.partitions is None or partition in self.partitions)
            and self.partition_span.start <= partition < self.partition_span.end
        )


class PushedLetters(NamedTuple):
    """Letters that filters leave to be read.

    `select` has properties for the broker's selection, `states` those that are left of
    the states to read. `rows` has the fields that no selection has, with their values.
    """

    select: Mapping[str, Any] = NO_SELECTION
    states: frozenset[str] | None = None
    rows: tuple[tuple[str, Values], ...] = ()

    def has(self, letter: Mapping[str, Any]) -> bool:
        """Return True if a letter, as the broker lists it, has these values."""
        return all(_is_among(letter[name], values) for name, values in self.rows)


def push_message_filters(filters: Iterable[Filter]) -> tuple[PushedMessages, list[Filter]]:
    """Return what filters leave of the messages, and those that Spark has to apply."""
    pushed, rest = PushedMessages(), []
    for one in filters:
        column = _column(one)
        if isinstance(one, IsNotNull) and column in MESSAGE_COLUMNS:
            continue  # always true
        names, span = _values(one, str), _span(one)
        numbers = _values(one, int)
        if column == "topic" and names is not None:
            pushed = pushed._replace(topics=_intersect(pushed.topics, names))
        elif column == "partition" and numbers is not None:
            pushed = pushed._replace(partitions=_intersect(pushed.partitions, numbers))
        elif column == "partition" and span is not None:
            pushed = pushed._replace(partition_span=pushed.partition_span.intersect(span))
        elif column == "offset" and span is not None:
            pushed = pushed._replace(offsets=pushed.offsets.intersect(span))
        else:
            if column == "stored_at" and (time := _span(one, datetime)) is not None:
                pushed = pushed._replace(stored=pushed.stored.intersect(time))
            rest.append(one)
    return pushed, rest


SELECTED: Final = {  # columns of letters and arguments of a selection, with the longest text
    "topic": ("topic", limits.NAME),
    "origin_topic": ("topic", limits.NAME),
    "key": ("key", limits.KEY),
    "error_type": ("error_type", SHORT),
    "fingerprint": ("fingerprint", SHORT),
}
JUDGED: Final = {  # columns of letters and fields of the broker's list
    "partition": "partition",
    "origin_partition": "partition",
    "offset": "offset",
    "origin_offset": "offset",
    "tag": "tag",
    "attempts": "attempts",
    "attempt": "attempts",
}


def push_letter_filters(
    filters: Iterable[Filter], chosen: Mapping[str, Any] = NO_SELECTION
) -> tuple[PushedLetters, list[Filter]]:
    """Return what filters leave of the letters that are `chosen` by an option, and the
    filters that Spark has to apply.
    """
    pushed, rest, died = PushedLetters(), [], ALL
    select = dict(chosen)
    for one in filters:
        column, text = _column(one), _text(one)
        argument, longest = SELECTED.get(column, ("", 0))
        states = _values(one, str) if column == "state" else None
        if isinstance(one, IsNotNull) and (column in JUDGED.keys() - {"tag"} or column == "topic"):
            continue  # always true
        if text is not None and argument not in select and _fits(text, argument, longest):
            select[argument] = text
        elif states is not None:
            pushed = pushed._replace(states=_intersect(pushed.states, states))
        elif column in JUDGED and (values := _judged(one)) is not None:
            pushed = pushed._replace(rows=(*pushed.rows, (JUDGED[column], values)))
        else:
            if column == "dead_at" and (time := _span(one, datetime)) is not None:
                died = died.intersect(time)
            rest.append(one)
    if died != ALL and not select.keys() & {"died_from", "died_before"}:
        select |= {"died_from": min(died.start, limits.TIME)}
        select |= {"died_before": min(max(died.end, died.start), limits.TIME)}
    return pushed._replace(select=select), rest


def _fits(text: str, argument: str, longest: int) -> bool:
    """Return True if the broker takes a text in a selection: of topics, names only."""
    return len(text.encode()) <= longest and (argument != "topic" or is_name(text) is not None)


def _column(one: Filter) -> str:
    path: tuple[str, ...] = getattr(one, "attribute", ())
    return path[0] if len(path) == 1 else ""


def _text(one: Filter) -> str | None:
    """Return the text that a column has to equal; "" is no text of a selection."""
    if isinstance(one, EqualTo | EqualNullSafe) and isinstance(one.value, str):
        return one.value or None
    return None


def _values(one: Filter, kind: type) -> frozenset[Any] | None:
    """Return the values that a column may have; None = the filter says otherwise."""
    if isinstance(one, EqualTo | EqualNullSafe):
        given: tuple[Any, ...] = (one.value,)
    elif isinstance(one, In):
        given = tuple(one.value)
    else:
        return None
    return frozenset(given) if all(_is(value, kind) for value in given) else None


def _span(one: Filter, kind: type = int) -> Span | None:
    """Return the range that a column has to be in; None = the filter says otherwise."""
    value: Any = getattr(one, "value", None)
    if not _is(value, kind):
        return None
    number: int = _micros(value) if kind is datetime else value
    spans = {
        EqualTo: Span(number, number + 1),
        EqualNullSafe: Span(number, number + 1),
        GreaterThan: Span(start=max(0, number + 1)),
        GreaterThanOrEqual: Span(start=max(0, number)),
        LessThan: Span(end=number),
        LessThanOrEqual: Span(end=number + 1),
    }
    return spans.get(type(one))


def _judged(one: Filter) -> Values | None:
    return _values(one, str) or _values(one, int) or _span(one)


def _is_among(value: Any, values: Values) -> bool:  # noqa: ANN401  # of any column
    """Return True if the value is one of these. Null is none and has no order."""
    if isinstance(values, Span):
        return value is not None and values.start <= value < values.end
    return value in values


def _is(value: object, kind: type) -> bool:
    if kind is datetime:
        return isinstance(value, datetime) and value.tzinfo is not None
    return isinstance(value, kind) and not isinstance(value, bool)


def _micros(at: datetime) -> int:
    return (at - EPOCH) // MICROSECOND


def _intersect(before: frozenset[Any] | None, values: frozenset[Any]) -> frozenset[Any]:
    return values if before is None else before & values
