"""Positions of the columns in a batch.

The columns follow in this order, without absent ones: key, tag, headers, body, born_at,
deliver_at, expire_at. The first four are each `count + 1` int32 offsets, padded to 8
bytes, then the joined bytes, padded to 8. The times are int64 each. Compressed bodies
have 8 bytes more before the joined bytes: their compressed length, and zero.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from txmq.batch.header import DELIVER_AT, EXPIRE_AT, HEADERS, KEY, LENGTH, TAG, BatchHeader, Codec
from txmq.errors import RemoteProtocolError

COMPRESSED = struct.Struct("<II")
OFFSET = struct.Struct("<i")


class Column(NamedTuple):
    """A column of cells: start of its offsets, start and end of its bytes."""

    offsets: int
    start: int
    end: int


class Layout(NamedTuple):
    """The columns of one batch, None for an absent one.

    The three times are positions of their first value; 0 = absent.
    """

    key: Column | None
    tag: Column | None
    headers: Column | None
    body: Column
    born_at: int
    deliver_at: int
    expire_at: int


def padded(size: int) -> int:
    """Return `size` rounded up to a multiple of 8."""
    return (size + 7) & -8


def locate(buffer: bytes, header: BatchHeader) -> Layout:
    """Return the layout of the batch with that header.

    Raises RemoteProtocolError where the columns do not fill the batch exactly.
    """
    try:
        layout, end = _walk(buffer, header)
    except struct.error as error:
        raise RemoteProtocolError(
            f"the columns of a batch run past its {header.length} bytes"
        ) from error
    if end != header.length:
        raise RemoteProtocolError(f"the columns of a batch of {header.length} bytes end at {end}")
    return layout


def _walk(buffer: bytes, header: BatchHeader) -> tuple[Layout, int]:
    columns, at = header.columns, LENGTH
    cells: list[Column | None] = []
    for flag in (KEY, TAG, HEADERS):
        column = _column(buffer, header.count, at) if columns & flag else None
        cells.append(column)
        at = padded(column.end) if column else at
    body = _body(buffer, header, at)
    born_at = padded(body.end)
    step = 8 * header.count
    deliver_at = born_at + step if columns & DELIVER_AT else 0
    expire_at = (deliver_at or born_at) + step if columns & EXPIRE_AT else 0
    key, tag, headers = cells
    layout = Layout(key, tag, headers, body, born_at, deliver_at, expire_at)
    return layout, (expire_at or deliver_at or born_at) + step


def _column(buffer: bytes, count: int, at: int) -> Column:
    (size,) = OFFSET.unpack_from(buffer, at + 4 * count)
    if size < 0:
        raise RemoteProtocolError(f"a column of a batch has negative length {size}")
    start = padded(at + 4 * (count + 1))
    return Column(at, start, start + size)


def _body(buffer: bytes, header: BatchHeader, at: int) -> Column:
    plain = _column(buffer, header.count, at)
    if plain.end - plain.start != header.size:
        raise RemoteProtocolError(
            f"the bodies of a batch have {plain.end - plain.start} bytes,"
            f" its header says {header.size}"
        )
    if header.codec == Codec.NONE:
        return plain
    size, zero = COMPRESSED.unpack_from(buffer, plain.start)
    if zero:
        raise RemoteProtocolError(f"reserved bytes of a batch are {zero}, not 0")
    start = plain.start + COMPRESSED.size
    return Column(at, start, start + size)
