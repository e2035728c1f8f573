"""Splitting of a batch into batches of one row, for rows that move alone."""

from __future__ import annotations

import struct
from typing import NamedTuple

from txmq.batch.decode import BatchView, cells_of
from txmq.batch.encode import pack_row
from txmq.batch.header import DELIVER_AT, BatchHeader, Codec
from txmq.batch.layout import Column, locate
from txmq.model.keys import key_hash, tag_bit


class RowBatch(NamedTuple):
    """A row as an uncompressed batch of its own.

    `deliver_at` is as the sender wrote it; 0 = at once.
    """

    data: bytes
    deliver_at: int
    sequence: int
    tag_bits: int
    key_hash: int | None


def split(buffer: bytes, header: BatchHeader) -> list[RowBatch]:
    """Return the rows of a verified batch as batches, in order.

    A batch that is a single uncompressed row is not copied.
    """
    layout = locate(buffer, header)
    count = header.count
    keys, tags, headers = (
        _cells(buffer, column, count) for column in (layout.key, layout.tag, layout.headers)
    )
    starts = (layout.born_at, layout.deliver_at, layout.expire_at)
    births, dues, ends = (
        struct.unpack_from(f"<{count}q", buffer, at) if at else (0,) * count for at in starts
    )
    whole = count == 1 and header.codec == Codec.NONE
    bodies = [b""] if whole else BatchView(buffer, header).bodies
    singles = []
    for row, (key, tag, pairs, body) in enumerate(zip(keys, tags, headers, bodies, strict=True)):
        sequence, bits = header.sequence + row, tag_bit(tag.decode()) if tag else 0
        producer = (header.producer_id, header.epoch, sequence)
        times = (births[row], dues[row], ends[row])
        data = buffer if whole else pack_row((key, tag, pairs, body), times, bits, producer)
        singles.append(RowBatch(data, dues[row], sequence, bits, key_hash(key) if key else None))
    return singles


def delivery_times(buffer: bytes, header: BatchHeader) -> tuple[int, ...]:
    """Return the column deliver_at of a verified batch, empty where it has none."""
    at = locate(buffer, header).deliver_at if header.columns & DELIVER_AT else 0
    return struct.unpack_from(f"<{header.count}q", buffer, at) if at else ()


def _cells(buffer: bytes, column: Column | None, count: int) -> list[bytes]:
    return [b""] * count if column is None else cells_of(buffer, column, count)
