"""Encoding of batches: from messages, from columns (for volume), from columns whose
cells are encoded already, and of one message.

All four give the same bytes for the same messages. A column is one `pack` of its
offsets and one `join` of its cells. For a single message that would cost more than the
rest of a send, so `pack_row` packs the whole batch with one struct.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, reduce
from itertools import accumulate
from typing import NamedTuple

from google_crc32c import extend, value

from txmq.batch.cells import (
    BODY_HINT,
    body_cell,
    header_cell,
    text_cell,
    text_too_long,
    too_large,
)
from txmq.batch.codecs import compress
from txmq.batch.header import FIELDS, LENGTH, MAGIC, OPTIONAL, PREFIX, VERSION, Codec
from txmq.batch.layout import COMPRESSED, OFFSET
from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.durations import Duration
from txmq.model.keys import tag_bit, tag_filter
from txmq.model.message import Message, time_or_duration, to_micros

ZEROS = tuple(bytes(n) for n in range(8))
TIME = struct.Struct("<q")
PRODUCER_ID = 16
NO_CODEC = int(Codec.NONE)  # an int, because members of an enum are slow to pack


class Cells(NamedTuple):
    """A column of cells as batches have it: int32 offsets from 0 on, and the joined
    cells.
    """

    offsets: bytes
    data: bytes


Buffers = tuple[bytes, ...]  # buffers of one column, in order; empty = the column is absent
# producer id (in a bundle: the token), producer epoch, sequence of the first row
ProducerSequence = tuple[bytes, int, int]


class _Rows(NamedTuple):
    """Messages column by column; None = no row has a value."""

    bodies: Sequence[bytes]
    keys: Sequence[str | None] | None = None
    tags: Sequence[str | None] | None = None
    headers: Sequence[Mapping[str, str] | None] | None = None
    deliver_at: Sequence[int | datetime | None] | None = None
    expire_at: Sequence[int | datetime | None] | None = None
    delay: Sequence[Duration | None] | None = None
    ttl: Sequence[Duration | None] | None = None


def encode(
    messages: Sequence[Message],
    *,
    producer_id: bytes,
    epoch: int,
    sequence: int,
    born_at: int | Sequence[int],
    codec: int = Codec.NONE,
) -> bytes:
    """Return the batch of these messages; `born_at` is one time, or one per message.

    Raises LocalProtocolError for values that no batch can hold, MessageTooLarge for a
    body or a batch beyond the limit.
    """
    try:
        rows = _Rows(*zip(*messages, strict=True)) if messages else _Rows(())
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(
            "messages must be a sequence of messages", hint="make each with txmq.Message(body, ...)"
        ) from error
    return _encode(rows, (producer_id, epoch, sequence), born_at, codec)


def encode_columns(  # one for each column
    bodies: Sequence[bytes],
    keys: Sequence[str | None] | None = None,
    tags: Sequence[str | None] | None = None,
    *,
    producer_id: bytes,
    epoch: int,
    sequence: int,
    born_at: int | Sequence[int],
    codec: int = Codec.NONE,
) -> bytes:
    """Return the batch of messages given as columns: a key and a tag for each body.

    Raises as `encode` does.
    """
    return _encode(_Rows(bodies, keys, tags), (producer_id, epoch, sequence), born_at, codec)


def encode_cells(  # noqa: PLR0913  # one for each column
    bodies: Cells,
    keys: Cells | None = None,
    tags: Cells | None = None,
    headers: Cells | None = None,
    *,
    tag_bits: int,
    producer_id: bytes,
    epoch: int,
    sequence: int,
    born_at: int,
    codec: int = Codec.NONE,
) -> bytes:
    """Return the batch of columns that are encoded already; None = all cells of a
    column are empty. `tag_bits` is the filter of the tags.

    The broker verifies the cells. Raises MessageTooLarge for a batch beyond the limit.
    """
    count = len(bodies.offsets) // OFFSET.size - 1
    codec, size, body = _packed(bodies, codec)
    births, youngest = _births(born_at, count)
    optional = [_padded(cells) if cells else () for cells in (keys, tags, headers)]
    columns = sum(flag for flag, buffers in zip(OPTIONAL, optional, strict=False) if buffers)
    key, tag, pairs = optional
    return join_columns(
        (*key, *tag, *pairs, *body, births),
        (codec, columns, count, size, youngest),
        tag_bits,
        _checked((producer_id, epoch, sequence)),
    )


def encode_one(
    message: Message, *, producer_id: bytes, epoch: int, sequence: int, born_at: int
) -> bytes:
    """Return the uncompressed batch of one message. Raises as `encode` does."""
    body, key, tag, headers, deliver_at, expire_at, delay, ttl = message
    cells = (
        text_cell(key, "key", limits.KEY) if key else b"",
        text_cell(tag, "tag", limits.TAG) if tag else b"",
        header_cell(headers) if headers else b"",
        body if type(body) is bytes and len(body) <= limits.MESSAGE else body_cell(body),
    )
    due = 0 if deliver_at is None and delay is None else time_or_duration(deliver_at, delay)
    end = 0 if expire_at is None and ttl is None else time_or_duration(expire_at, ttl)
    valid = type(born_at) is int and 0 <= born_at <= limits.TIME
    times = (born_at if valid else to_micros(born_at), due, end)
    return pack_row(cells, times, tag_bit(tag) if tag else 0, (producer_id, epoch, sequence))


def pack_row(
    cells: tuple[bytes, bytes, bytes, bytes],
    times: tuple[int, int, int],
    tag_bits: int,
    producer: ProducerSequence,
) -> bytes:
    """Return the batch of one row.

    `cells` are key, tag, headers and body; `times` are born_at, deliver_at and
    expire_at. Empty and 0 mean no value.
    """
    key, tag, headers, body = cells
    born_at, deliver_at, expire_at = times
    size = len(body)
    # `layout.padded`, written out: a call for each cell of each send adds up.
    shape, length, columns = _shape(
        len(key) + 7 & -8,
        len(tag) + 7 & -8,
        len(headers) + 7 & -8,
        size + 7 & -8,
        deliver_at > 0,
        expire_at > 0,
    )
    producer_id, epoch, sequence = _checked(producer)
    packed = shape.pack(
        *(
            VERSION,
            NO_CODEC,
            columns,
            1,
            length,
            size,
            born_at,
            tag_bits,
            producer_id,
            epoch,
            0,
            sequence,
        ),
        *((0, len(key), key) if key else ()),
        *((0, len(tag), tag) if tag else ()),
        *((0, len(headers), headers) if headers else ()),
        *(0, size, body, born_at),
        *((deliver_at,) if deliver_at else ()),
        *((expire_at,) if expire_at else ()),
    )
    return PREFIX.pack(MAGIC, value(packed)) + packed


@lru_cache(maxsize=4096)
def _shape(*sizes: int) -> tuple[struct.Struct, int, int]:
    """Return struct after the prefix, length and columns of a batch of one row.

    `sizes` are the padded sizes of key, tag, headers and body (packing fills them up
    with zeros), then the presence of deliver_at and expire_at.
    """
    *optional, body, deliver_at, expire_at = sizes
    present = (*optional, deliver_at, expire_at)
    columns = sum(flag for flag, size in zip(OPTIONAL, present, strict=True) if size)
    cells = "".join(f"ii{size}s" for size in optional if size)
    shape = struct.Struct(f"{FIELDS.format}{cells}ii{body}sq{'q' * (deliver_at + expire_at)}")
    return shape, PREFIX.size + shape.size, columns


def _encode(
    rows: _Rows, producer: ProducerSequence, born_at: int | Sequence[int], codec: int
) -> bytes:
    _checked(producer)
    count = len(rows.bodies)
    if not 0 < count <= limits.BATCH_ROWS or any(
        column is not None and len(column) != count for column in rows
    ):
        lengths = [len(column) for column in rows if column is not None]
        hint = f"give each body one key and one tag, and 1 to {limits.BATCH_ROWS} rows"
        raise LocalProtocolError(f"the columns of a batch have {lengths} rows", hint=hint)
    codec, size, body = _bodies(rows.bodies, codec)
    births, youngest = _births(born_at, count)
    optional = (
        _texts(rows.keys, "key", limits.KEY),
        _texts(rows.tags, "tag", limits.TAG),
        _headers(rows.headers),
        _times(rows.deliver_at, rows.delay),
        _times(rows.expire_at, rows.ttl),
    )
    columns = sum(flag for flag, buffers in zip(OPTIONAL, optional, strict=True) if buffers)
    key, tag, headers, deliver_at, expire_at = optional
    buffers = (*key, *tag, *headers, *body, births, *deliver_at, *expire_at)
    tags = tag_filter(text for text in rows.tags if text) if tag and rows.tags else 0
    return join_columns(buffers, (codec, columns, count, size, youngest), tags, producer)


def join_columns(
    buffers: Buffers, shape: tuple[int, int, int, int, int], tags: int, producer: ProducerSequence
) -> bytes:
    """Return the batch that these buffers fill. `shape` is codec, columns, count of
    rows, size of the bodies and the youngest born_at.
    """
    codec, columns, count, size, youngest = shape
    producer_id, epoch, sequence = producer
    length = LENGTH + sum(map(len, buffers))
    if length > limits.BATCH:
        raise too_large("batch", length, limits.BATCH)
    fields = FIELDS.pack(
        VERSION,
        codec,
        columns,
        count,
        length,
        size,
        youngest,
        tags,
        producer_id,
        epoch,
        0,
        sequence,
    )
    checksum = reduce(extend, buffers, value(fields))
    return b"".join((PREFIX.pack(MAGIC, checksum), fields, *buffers))


def _checked(producer: ProducerSequence) -> ProducerSequence:
    if len(producer[0]) != PRODUCER_ID:
        raise LocalProtocolError(
            f"a producer id or token has {len(producer[0])} bytes, not {PRODUCER_ID}"
        )
    return producer


def _texts(texts: Sequence[str | None] | None, kind: str, limit: int) -> Buffers:
    if texts is None or not any(texts):
        return ()
    filled = [text or "" for text in texts]
    try:
        joined = "".join(filled)
        data = joined.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"a {kind} must be text that UTF-8 can encode: {error}") from error
    lengths = list(map(len, filled if joined.isascii() else [text.encode() for text in filled]))
    if max(lengths) > limit:
        raise text_too_long(kind, max(lengths), limit)
    return column_of(lengths, data)


def _headers(headers: Sequence[Mapping[str, str] | None] | None) -> Buffers:
    if headers is None or not any(headers):
        return ()
    cells = list(map(header_cell, headers))
    return column_of(list(map(len, cells)), b"".join(cells))


def _bodies(bodies: Sequence[bytes], codec: int) -> tuple[int, int, Buffers]:
    try:
        data = b"".join(bodies)
    except TypeError as error:
        raise LocalProtocolError(f"a body must be bytes: {error}", hint=BODY_HINT) from error
    lengths = list(map(len, bodies))
    if sum(lengths) != len(data):
        raise LocalProtocolError(
            "a body must be bytes, not a buffer of larger items", hint=BODY_HINT
        )
    if len(data) > limits.MESSAGE and max(lengths) > limits.MESSAGE:
        raise too_large("message", max(lengths), limits.MESSAGE)
    if len(data) > limits.BATCH:
        raise too_large("batch", len(data), limits.BATCH)
    return _packed(_cells(lengths, data), codec)


def _packed(bodies: Cells, codec: int) -> tuple[int, int, Buffers]:
    """Return the codec that is of use, the size of the bodies, and their buffers."""
    data = bodies.data
    packed = compress(codec, data)
    plain = _padded(bodies)
    if len(packed) + COMPRESSED.size >= len(data):
        return Codec.NONE, len(data), plain
    end = (COMPRESSED.pack(len(packed), 0), packed, ZEROS[-len(packed) % 8])
    return codec, len(data), (*plain[:2], *end)


def column_of(lengths: list[int], data: bytes) -> Buffers:
    """Return the buffers of a column, given the lengths and the joined cells."""
    return _padded(_cells(lengths, data))


def _padded(cells: Cells) -> Buffers:
    """Return the buffers of a column."""
    offsets, data = cells
    return offsets, ZEROS[-len(offsets) % 8], data, ZEROS[-len(data) % 8]


def _cells(lengths: list[int], data: bytes) -> Cells:
    return Cells(struct.pack(f"<{len(lengths) + 1}i", *accumulate(lengths, initial=0)), data)


def _births(born_at: int | Sequence[int], count: int) -> tuple[bytes, int]:
    if isinstance(born_at, int):
        return TIME.pack(to_micros(born_at)) * count, born_at
    if len(born_at) != count:
        raise LocalProtocolError(f"born_at has {len(born_at)} times for {count} messages")
    youngest = to_micros(max(born_at))
    to_micros(min(born_at))
    try:
        return struct.pack(f"<{count}q", *born_at), youngest
    except struct.error as error:
        raise LocalProtocolError(f"born_at must be ints of microseconds: {error}") from error


def _times(
    times: Sequence[int | datetime | None] | None, durations: Sequence[Duration | None] | None
) -> Buffers:
    if times is None or durations is None or not (any(times) or any(durations)):
        return ()
    values = [
        time_or_duration(time, duration) for time, duration in zip(times, durations, strict=True)
    ]
    return (struct.pack(f"<{len(values)}q", *values),) if any(values) else ()
