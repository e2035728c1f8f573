"""Messages on their way to be encoded: as messages, or as columns for volumes.

Both are cut into pieces small enough for a frame. The estimate of a piece's size is
generous: characters count as four bytes, which UTF-8 never exceeds, so that no piece
turns out too large when it is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import Protocol, Self, TypeVar

from txmq.batch import PLAIN, Compression, encode, encode_columns, encode_one
from txmq.batch.cells import body_cell, header_cell, text_cell
from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.keys import partition_of
from txmq.model.message import Message, time_or_span

PIECE_BYTES = 1 << 20  # a batch of this size costs the broker little more than its copying
PIECE_ROWS = 1 << 16
# of a part of a group: to take so many keys holds a broker up for 1 to 2 ms; it would
# take 4,096
PART_ROWS = 512
ROW_BYTES = 64  # offsets and times of a row
BODY_ALONE = Message(b"")[1:]
T = TypeVar("T")


class Rows(Protocol):
    """Messages of one topic, in order."""

    def __len__(self) -> int: ...

    def encode(self, producer_id: bytes, sequence: int, compression: Compression = PLAIN) -> bytes:
        """The batch of them all."""

    def pieces(self, most: int = PIECE_ROWS) -> Iterator[Self]:
        """The same messages in pieces that fit in a frame, of at most so many."""

    def keys_of(self) -> Sequence[str | None] | None:
        """The key of each, None where none has one."""

    def largest(self) -> int:
        """The size of the largest body."""

    def pick(self, places: Sequence[int]) -> Self:
        """Those at these places."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages one by one, and when each was born, in microseconds."""

    messages: Sequence[Message]
    births: Sequence[int]

    def __len__(self) -> int:
        return len(self.messages)

    def encode(self, producer_id: bytes, sequence: int, compression: Compression = PLAIN) -> bytes:
        packed = compression.codec and compression.of(
            sum(len(message.body) for message in self.messages)
        )
        if len(self.messages) == 1 and not packed:
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
            codec=packed,
        )

    def pieces(self, most: int = PIECE_ROWS) -> Iterator[Messages]:
        for start, end in cuts(list(map(weight, self.messages)), at_most(self.messages, most)):
            yield Messages(self.messages[start:end], self.births[start:end])

    def keys_of(self) -> Sequence[str | None] | None:
        return [message.key for message in self.messages]

    def largest(self) -> int:
        return max(len(message.body) for message in self.messages)

    def pick(self, places: Sequence[int]) -> Messages:
        return Messages(_picked(self.messages, places), _picked(self.births, places))


@dataclass(frozen=True, slots=True)
class Columns:
    """Bodies, and a key and a tag for each where there are any; all born at the same
    time.
    """

    bodies: Sequence[bytes]
    keys: Sequence[str | None] | None
    tags: Sequence[str | None] | None
    born_at: int

    def __len__(self) -> int:
        return len(self.bodies)

    def encode(self, producer_id: bytes, sequence: int, compression: Compression = PLAIN) -> bytes:
        return encode_columns(
            *(self.bodies, self.keys, self.tags),
            producer_id=producer_id,
            epoch=0,
            sequence=sequence,
            born_at=self.born_at,
            codec=compression.codec and compression.of(sum(map(len, self.bodies))),
        )

    def pieces(self, most: int = PIECE_ROWS) -> Iterator[Columns]:
        weights = _weights(self.bodies)
        for column in (self.keys, self.tags):
            if column is not None:
                weights = _heavier(weights, column)
        for start, end in cuts(weights, most):
            yield Columns(
                self.bodies[start:end],
                None if self.keys is None else self.keys[start:end],
                None if self.tags is None else self.tags[start:end],
                self.born_at,
            )

    def keys_of(self) -> Sequence[str | None] | None:
        return self.keys

    def largest(self) -> int:
        return max(map(len, self.bodies))

    def pick(self, places: Sequence[int]) -> Columns:
        return Columns(
            _picked(self.bodies, places),
            None if self.keys is None else _picked(self.keys, places),
            None if self.tags is None else _picked(self.tags, places),
            self.born_at,
        )


def columns(
    bodies: Sequence[bytes],
    keys: Sequence[str | None] | None,
    tags: Sequence[str | None] | None,
    born_at: int,
) -> Columns:
    """The columns, if there is a key and a tag for each body. Raises
    LocalProtocolError.
    """
    check_columns(bodies, keys, tags)
    return Columns(bodies, keys, tags, born_at)


def check_columns(
    bodies: Sequence[bytes], keys: Sequence[str | None] | None, tags: Sequence[str | None] | None
) -> None:
    """Raises LocalProtocolError where there is not a key and a tag for each body."""
    for name, column in (("keys", keys), ("tags", tags)):
        if column is not None and len(column) != len(bodies):
            raise LocalProtocolError(
                f"{len(column)} {name} for {len(bodies)} bodies", hint="give each body its own"
            )


def weight(message: Message) -> int:
    """At most so many bytes of a batch go to this message."""
    body, key, tag, headers, *_times = message
    size = len(body) + ROW_BYTES
    if key or tag:
        size += 4 * (len(key or "") + len(tag or ""))
    if headers:
        size += 4 * sum(map(len, chain(headers.keys(), headers.values()))) + 10 * len(headers)
    return size


def at_most(messages: Sequence[Message], most: int) -> int:
    """How many of so many may share a batch: where one is delayed, the broker takes it
    apart.
    """
    if most <= limits.DELAYED_ROWS or len(messages) <= limits.DELAYED_ROWS:
        return most
    delayed = any(message.deliver_at or message.delay for message in messages)
    return limits.DELAYED_ROWS if delayed else most


def kept(message: Message) -> Message:
    """The message, so that nobody can change it. Raises what encoding it would: then,
    it would take others along.
    """
    body, key, tag, headers, deliver_at, expire_at, delay, ttl = message
    data = body_cell(body)
    if key:
        text_cell(key, "key", limits.KEY)
    if tag:
        text_cell(tag, "tag", limits.TAG)
    if headers:
        header_cell(headers)
        message = message._replace(headers=dict(headers))
    if not (deliver_at is delay is expire_at is ttl is None):
        time_or_span(deliver_at, delay)
        time_or_span(expire_at, ttl)
    return message if data is body else message._replace(body=data)


def taken(message: Message) -> tuple[Message, int]:
    """The message as `kept` gives it, and its weight: in a short way where it has
    nothing but a body.
    """
    body = message[0]
    if message[1:] == BODY_ALONE and type(body) is bytes and len(body) <= limits.MESSAGE:
        return message, len(body) + ROW_BYTES
    message = kept(message)
    return message, weight(message)


def by_partition(keys: Sequence[str | None], partitions: int, keyless: int) -> dict[int, list[int]]:
    """The places of the messages for each partition; those without a key go to
    partition `keyless`.
    """
    try:
        known = {key: partition_of(key, partitions) if key else keyless for key in set(keys)}
    except (TypeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(
            f"a key of another kind: {error}", hint="it is text that UTF-8 can hold"
        ) from error
    places: dict[int, list[int]] = {}
    for place, partition in enumerate(map(known.__getitem__, keys)):
        places.setdefault(partition, []).append(place)
    return places


def _heavier(weights: list[int], column: Sequence[str | None]) -> list[int]:
    try:
        return [size + 4 * len(text or "") for size, text in zip(weights, column, strict=True)]
    except TypeError as error:
        raise LocalProtocolError(
            f"a key or tag of another kind: {error}", hint="it is text or None"
        ) from error


def _weights(bodies: Sequence[bytes]) -> list[int]:
    try:
        return [len(body) + ROW_BYTES for body in bodies]
    except TypeError as error:
        raise LocalProtocolError(f"a body of another kind: {error}", hint="it is bytes") from error


def cuts(weights: list[int], most: int = PIECE_ROWS) -> Iterator[tuple[int, int]]:
    """Where to cut messages of these weights: no piece has more than `most`, or is over
    the size unless a single message is.
    """
    count = len(weights)
    if count <= most and sum(weights) <= PIECE_BYTES:
        yield from ((0, count),) if count else ()
        return
    start, begun = 0, 0
    for end, total in enumerate(accumulate(weights)):
        if end > start and (total - begun > PIECE_BYTES or end - start >= most):
            yield start, end
            start, begun = end, total - weights[end]
    yield start, count


def _picked(column: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    return itemgetter(*places)(column) if len(places) > 1 else [column[places[0]]]
