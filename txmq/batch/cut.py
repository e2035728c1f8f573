"""Neighbouring rows of a batch as a batch of their own, for redeliveries."""

from __future__ import annotations

import struct
from itertools import pairwise

from txmq.batch.decode import BatchView, single_row
from txmq.batch.encode import Buffers, column_of, join_columns
from txmq.batch.header import OPTIONAL
from txmq.batch.layout import Column, locate
from txmq.model.keys import tag_filter


def cut_rows(buffer: bytes, first: int, rows: int, view: BatchView | None = None) -> bytes:
    """Return neighbouring rows of a verified batch as an uncompressed batch of their
    own, with the same producer and epoch, and their own sequences.
    """
    if rows == 1:
        return single_row(buffer, first, view)
    view = view or BatchView(buffer)
    header, layout = view.header, locate(buffer, view.header)
    end = first + rows
    key, tag, headers = (
        _cut(buffer, column, first, rows) for column in (layout.key, layout.tag, layout.headers)
    )
    if header.codec:
        bodies = view.bodies[first:end]
        body = column_of(list(map(len, bodies)), b"".join(bodies))
    else:
        body = _cut(buffer, layout.body, first, rows) or column_of([0] * rows, b"")
    births, dues, ends = (
        buffer[at + 8 * first : at + 8 * end] if at else b""
        for at in (layout.born_at, layout.deliver_at, layout.expire_at)
    )
    deliver_at, expire_at = ((times,) if any(times) else () for times in (dues, ends))
    optional: tuple[Buffers, ...] = (key, tag, headers, deliver_at, expire_at)
    columns = sum(flag for flag, buffers in zip(OPTIONAL, optional, strict=True) if buffers)
    return join_columns(
        (*key, *tag, *headers, *body, births, *deliver_at, *expire_at),
        (0, columns, rows, len(body[2]), max(struct.unpack(f"<{rows}q", births))),
        tag_filter(text for text in view.tags[first:end] if text) if tag else 0,
        (header.producer_id, header.epoch, header.sequence + first),
    )


def _cut(buffer: bytes, column: Column | None, first: int, rows: int) -> Buffers:
    """Return the buffers of a part of a column; () = all its cells are empty."""
    if column is None:
        return ()
    offsets = struct.unpack_from(f"<{rows + 1}i", buffer, column.offsets + 4 * first)
    start, end = offsets[0], offsets[-1]
    if start == end:
        return ()
    lengths = [after - before for before, after in pairwise(offsets)]
    return column_of(lengths, buffer[column.start + start : column.start + end])
