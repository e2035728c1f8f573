"""Chunks: the content of FETCH and READ replies (docs/FORMATS.md 2.2).

A chunk is batches as they were sent, with the place of their rows.

    u32 chunks | u32 generation | i64 next offset or -1, then for each chunk:
    i64 base offset | i64 stored_at | i64 position | u32 partition | u16 attempt
    u16 flags | i64 lease id or -1 | str topic, padded to 8 | u32 length
    u32 first row | u32 rows | u32 further batches
    for each of these: u32 length, u32 rows, i64 stored_at
    batches
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from txmq.batch import read_header
from txmq.errors import RemoteProtocolError
from txmq.wire.payload_reader import PayloadReader

HEAD = struct.Struct("<IIq")
PLACE = struct.Struct("<qqqIHHq")
ROWS = struct.Struct("<IIII")
FURTHER = struct.Struct("<IIq")
# flags: retries or replays; only some of the batch's rows; no filter has a say any
# more; a consumer was lost with them
REDELIVERY, SUBSET, ACCEPTED, SUSPECT = 1, 2, 4, 8
ALIGN = 8  # of a batch in the payload, so that Arrow can use its columns in place


FurtherBatch = tuple[int, int, int]  # one more batch of a chunk: bytes, rows, time of storage


class Chunk(NamedTuple):
    """`rows` rows of a batch from `first_row` on; row r has offset `base_offset` + r.

    `attempt` counts deliveries from 1. `lease_id` is -1 without a lease. With `further`
    batches the chunk is a run: `batch` holds all batches back to back, rows count
    through, and `stored_at` and `position` are those of the first batch.
    """

    topic: str
    partition: int
    base_offset: int
    stored_at: int
    position: int
    attempt: int
    flags: int
    lease_id: int
    first_row: int
    rows: int
    batch: bytes
    further: tuple[FurtherBatch, ...] = ()


class Chunks(NamedTuple):
    """A reply; `next_offset` is where to read next, -1 in the reply to a FETCH."""

    generation: int
    next_offset: int
    chunks: tuple[Chunk, ...]


def pack_chunks(
    chunks: Sequence[Chunk], *, generation: int = 0, next_offset: int = -1
) -> list[bytes]:
    """Return the payload as buffers; batches are not copied."""
    buffers = [HEAD.pack(len(chunks), generation, next_offset)]
    for chunk in chunks:
        buffers += (_chunk_head(chunk), chunk.batch)
    return buffers


def chunk_size(topic: str, batch_length: int) -> int:
    """Return the bytes of a chunk in a payload, for callers with a limit."""
    return _padded(PLACE.size + 1 + len(topic)) + ROWS.size + batch_length


def unpack_chunks(payload: bytes) -> Chunks:
    """Return the chunks of a payload: whole batches with plausible headers.

    Raises RemoteProtocolError.
    """
    reader = PayloadReader(payload)
    count, generation, next_offset = reader.fields(HEAD)
    if next_offset < -1:
        raise RemoteProtocolError(f"invalid next offset {next_offset}")
    chunks = tuple(_chunks(reader, count))
    reader.end()
    return Chunks(generation, next_offset, chunks)


def _chunk_head(chunk: Chunk) -> bytes:
    place = PLACE.pack(
        *(chunk.base_offset, chunk.stored_at, chunk.position, chunk.partition),
        *(chunk.attempt, chunk.flags, chunk.lease_id),
    )
    topic = chunk.topic.encode()
    head = place + bytes((len(topic),)) + topic
    rows = ROWS.pack(len(chunk.batch), chunk.first_row, chunk.rows, len(chunk.further))
    further = [FURTHER.pack(*one) for one in chunk.further]
    return b"".join((head.ljust(_padded(len(head)), b"\0"), rows, *further))


def _chunks(reader: PayloadReader, count: int) -> Iterable[Chunk]:
    for _ in range(count):
        base_offset, stored_at, position, partition, attempt, flags, lease_id = reader.fields(PLACE)
        topic = reader.name()
        reader.read(-reader.at % ALIGN)
        length, first_row, rows, further_count = reader.fields(ROWS)
        further = tuple(FURTHER.iter_unpack(reader.read(FURTHER.size * further_count)))
        batch = reader.read(length)
        header = read_header(batch)
        numbers = base_offset >= 0 and stored_at >= 0 and position >= 0 and lease_id >= -1
        if not numbers or flags > REDELIVERY | SUBSET | ACCEPTED | SUSPECT:
            raise RemoteProtocolError(
                f"invalid chunk of {topic}: offset {base_offset}, flags {flags}"
            )
        count = header.count + sum(rows for _length, rows, _stored_at in further)
        total = header.length + sum(length for length, _rows, _stored_at in further)
        if total != length or first_row >= header.count or not 0 < rows <= count - first_row:
            raise RemoteProtocolError(
                f"invalid chunk: {rows} rows from {first_row} of batches of {count} rows"
            )
        yield Chunk(
            *(topic, partition, base_offset, stored_at, position, attempt, flags, lease_id),
            *(first_row, rows, batch, further),
        )


def _padded(size: int) -> int:
    return size + -size % ALIGN
