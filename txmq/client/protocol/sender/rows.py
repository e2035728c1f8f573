"""Rows to send: messages one by one, or columns for volumes.

Both are split into batches that fit in a frame. The estimate of a batch's size is
generous: each character counts as four bytes, the most that UTF-8 needs. So no batch
is too large once it is encoded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, chain
from operator import itemgetter
from typing import Protocol, Self, TypedDict, TypeVar

from txmq.batch import NO_COMPRESSION, Compression, encode, encode_columns, encode_one
from txmq.batch.cells import body_cell, header_cell, text_cell, too_large
from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.keys import partition_of
from txmq.model.message import Message, time_or_duration

BATCH_BYTES = 1 << 20  # a batch of this size costs the broker little more than its copying
# At first, and while receipts are slow: a decision at the broker waits for the batches
# before it.
SMALL_BATCH_BYTES = 128 << 10
BATCH_ROWS = 1 << 16
# Rows of a part of a bundle. Their keys hold a broker up for 1 to 2 ms; it would accept
# 4,096.
PART_ROWS = 512
ROW_OVERHEAD = 64  # bytes of offsets and times
BODY_ONLY = Message(b"")[1:]
T = TypeVar("T")


class Fields(TypedDict, total=False):
    """The fields of txmq.Message besides the body."""

    key: str | None
    tag: str | None
    headers: Mapping[str, str] | None
    deliver_at: int | datetime | None
    expire_at: int | datetime | None
    delay: float | timedelta | None
    ttl: float | timedelta | None


class Rows(Protocol):
    """Messages of one topic, in order."""

    def __len__(self) -> int: ...

    def encode(
        self,
        producer_id: bytes,
        sequence: int,
        compression: Compression = NO_COMPRESSION,
        max_body: int = limits.MESSAGE,
    ) -> bytes:
        """Return the batch of all rows. Raises MessageTooLarge for a body over the
        limit.
        """

    def split(self, max_rows: int = BATCH_ROWS) -> Iterator[Self]:
        """Yield the same rows in batches that fit in a frame."""

    def row_keys(self) -> Sequence[str | None] | None:
        """Return the key of each row, or None where no row has one."""

    def places(self, partitions: int, keyless: int) -> dict[int, list[int]]:
        """Return the places of the rows of each partition; rows without a key go to
        `keyless`.
        """

    def largest_body(self) -> int:
        """Return the size of the largest body."""

    def select(self, places: Sequence[int]) -> Self:
        """Return the rows at these places."""


@dataclass(frozen=True, slots=True)
class MessageRows:
    """Messages, and the time at which each was born, in microseconds."""

    messages: Sequence[Message]
    births: Sequence[int]

    def __len__(self) -> int:
        return len(self.messages)

    def encode(
        self,
        producer_id: bytes,
        sequence: int,
        compression: Compression = NO_COMPRESSION,
        max_body: int = limits.MESSAGE,
    ) -> bytes:
        if max_body < limits.MESSAGE:
            _check_largest(self, max_body)
        codec = compression.codec and compression.codec_for(
            sum(len(message.body) for message in self.messages)
        )
        if len(self.messages) == 1 and not codec:
            born_at = self.births[0]
            return encode_one(
                self.messages[0],
                producer_id=producer_id,
                epoch=0,
                sequence=sequence,
                born_at=born_at,
            )
        return encode(
            self.messages,
            producer_id=producer_id,
            epoch=0,
            sequence=sequence,
            born_at=self.births,
            codec=codec,
        )

    def split(self, max_rows: int = BATCH_ROWS) -> Iterator[MessageRows]:
        sizes = list(map(estimated_size, self.messages))
        for start, end in batch_bounds(sizes, row_limit(self.messages, max_rows)):
            yield MessageRows(self.messages[start:end], self.births[start:end])

    def row_keys(self) -> list[str | None]:
        return [message.key for message in self.messages]

    def places(self, partitions: int, keyless: int) -> dict[int, list[int]]:
        return places_by_partition(self.row_keys(), partitions, keyless)

    def largest_body(self) -> int:
        return max(len(message.body) for message in self.messages)

    def select(self, places: Sequence[int]) -> MessageRows:
        return MessageRows(_select(self.messages, places), _select(self.births, places))


@dataclass(frozen=True, slots=True)
class ColumnRows:
    """Bodies, and optional columns of keys and tags. All rows are born at one time."""

    bodies: Sequence[bytes]
    keys: Sequence[str | None] | None
    tags: Sequence[str | None] | None
    born_at: int

    def __len__(self) -> int:
        return len(self.bodies)

    def encode(
        self,
        producer_id: bytes,
        sequence: int,
        compression: Compression = NO_COMPRESSION,
        max_body: int = limits.MESSAGE,
    ) -> bytes:
        if max_body < limits.MESSAGE:
            _check_largest(self, max_body)
        return encode_columns(
            *(self.bodies, self.keys, self.tags),
            producer_id=producer_id,
            epoch=0,
            sequence=sequence,
            born_at=self.born_at,
            codec=compression.codec and compression.codec_for(sum(map(len, self.bodies))),
        )

    def split(self, max_rows: int = BATCH_ROWS) -> Iterator[ColumnRows]:
        sizes = _body_sizes(self.bodies)
        for column in (self.keys, self.tags):
            if column is not None:
                sizes = _add_text_sizes(sizes, column)
        for start, end in batch_bounds(sizes, max_rows):
            yield ColumnRows(
                self.bodies[start:end],
                None if self.keys is None else self.keys[start:end],
                None if self.tags is None else self.tags[start:end],
                self.born_at,
            )

    def row_keys(self) -> Sequence[str | None] | None:
        return self.keys

    def places(self, partitions: int, keyless: int) -> dict[int, list[int]]:
        if self.keys is None:
            return {keyless: list(range(len(self)))}
        return places_by_partition(self.keys, partitions, keyless)

    def largest_body(self) -> int:
        return max(map(len, self.bodies))

    def select(self, places: Sequence[int]) -> ColumnRows:
        return ColumnRows(
            _select(self.bodies, places),
            None if self.keys is None else _select(self.keys, places),
            None if self.tags is None else _select(self.tags, places),
            self.born_at,
        )


def column_rows(
    bodies: Sequence[bytes],
    keys: Sequence[str | None] | None,
    tags: Sequence[str | None] | None,
    born_at: int,
) -> ColumnRows:
    """Return the columns as rows. Raises as `check_columns`."""
    check_columns(bodies, keys, tags)
    return ColumnRows(bodies, keys, tags, born_at)


def column_messages(
    bodies: Sequence[bytes], keys: Sequence[str | None] | None, tags: Sequence[str | None] | None
) -> list[Message]:
    """Return the rows of columns as messages. Raises as `check_columns`."""
    check_columns(bodies, keys, tags)
    none = [None] * len(bodies)
    rows = zip(bodies, keys or none, tags or none, strict=True)
    return [Message(body, key, tag) for body, key, tag in rows]


def check_columns(
    bodies: Sequence[bytes], keys: Sequence[str | None] | None, tags: Sequence[str | None] | None
) -> None:
    """Raise LocalProtocolError where columns differ in length."""
    for name, column in (("keys", keys), ("tags", tags)):
        if column is not None and len(column) != len(bodies):
            raise LocalProtocolError(
                f"{len(column)} {name} for {len(bodies)} bodies", hint="give each body its own"
            )


def checked_messages(messages: Iterable[Message]) -> list[Message]:
    """Return the messages as a list. Raises LocalProtocolError for other objects."""
    listed = list(messages)
    if not all(isinstance(message, Message) for message in listed):
        raise LocalProtocolError(
            "not a sequence of messages", hint="make them with txmq.Message(body, ...)"
        )
    return listed


def micros_now() -> int:
    """Return this machine's time in microseconds, at which a message is born."""
    return time.time_ns() // 1_000


def estimated_size(message: Message) -> int:
    """Return an upper bound of a message's bytes in a batch."""
    body, key, tag, headers, *_times = message
    size = len(body) + ROW_OVERHEAD
    if key or tag:
        size += 4 * (len(key or "") + len(tag or ""))
    if headers:
        size += 4 * sum(map(len, chain(headers.keys(), headers.values()))) + 10 * len(headers)
    return size


def row_limit(messages: Sequence[Message], max_rows: int) -> int:
    """Return the most rows of a batch of these messages, at most `max_rows`.

    A batch with a delayed message is smaller, because the broker splits it into rows.
    """
    if max_rows <= limits.DELAYED_ROWS or len(messages) <= limits.DELAYED_ROWS:
        return max_rows
    delayed = any(message.deliver_at or message.delay for message in messages)
    return limits.DELAYED_ROWS if delayed else max_rows


def frozen(message: Message) -> Message:
    """Return the message in a form that its sender cannot change.

    Raises the errors of encoding: later, an error would concern the whole batch.
    """
    body, key, tag, headers, deliver_at, expire_at, delay, ttl = message
    data = body if type(body) is bytes and len(body) <= limits.MESSAGE else body_cell(body)
    if key:
        text_cell(key, "key", limits.KEY)
    if tag:
        text_cell(tag, "tag", limits.TAG)
    if headers:
        header_cell(headers)
        message = message._replace(headers=dict(headers))
    if not (deliver_at is delay is expire_at is ttl is None):
        time_or_duration(deliver_at, delay)
        time_or_duration(expire_at, ttl)
    return message if data is body else message._replace(body=data)


def frozen_with_size(message: Message) -> tuple[Message, int]:
    """Return the frozen message and its estimated size, fast where it is only a
    body.
    """
    body = message[0]
    if message[1:] == BODY_ONLY and type(body) is bytes and len(body) <= limits.MESSAGE:
        return message, len(body) + ROW_OVERHEAD
    message = frozen(message)
    return message, estimated_size(message)


def places_by_partition(
    keys: Sequence[str | None], partitions: int, keyless: int
) -> dict[int, list[int]]:
    """Return the places of the rows of each partition; rows without a key go to
    `keyless`.
    """
    try:
        partition_by_key = {
            key: partition_of(key, partitions) if key else keyless for key in set(keys)
        }
    except (TypeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(
            f"a key of another type: {error}", hint="use text that UTF-8 can encode"
        ) from error
    places: dict[int, list[int]] = {}
    for place, partition in enumerate(map(partition_by_key.__getitem__, keys)):
        places.setdefault(partition, []).append(place)
    return places


def batch_bounds(
    sizes: list[int], max_rows: int = BATCH_ROWS, max_bytes: int = BATCH_BYTES
) -> Iterator[tuple[int, int]]:
    """Yield start and end of each batch of rows with these sizes.

    A batch is within both limits, unless it is a single row.
    """
    count = len(sizes)
    if count <= max_rows and sum(sizes) <= max_bytes:
        yield from ((0, count),) if count else ()
        return
    start, before = 0, 0
    for end, total in enumerate(accumulate(sizes)):
        if end > start and (total - before > max_bytes or end - start >= max_rows):
            yield start, end
            start, before = end, total - sizes[end]
    yield start, count


def _check_largest(rows: Rows, max_body: int) -> None:
    if (largest := rows.largest_body()) > max_body:
        raise too_large("message", largest, max_body)


def _add_text_sizes(sizes: list[int], column: Sequence[str | None]) -> list[int]:
    try:
        return [size + 4 * len(text or "") for size, text in zip(sizes, column, strict=True)]
    except TypeError as error:
        raise LocalProtocolError(
            f"a key or tag of another type: {error}", hint="use text or None"
        ) from error


def _body_sizes(bodies: Sequence[bytes]) -> list[int]:
    try:
        return [len(body) + ROW_OVERHEAD for body in bodies]
    except TypeError as error:
        raise LocalProtocolError(f"a body of another type: {error}", hint="use bytes") from error


def _select(column: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    return itemgetter(*places)(column) if len(places) > 1 else [column[places[0]]]
