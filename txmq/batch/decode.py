"""Readers of verified batches: whole columns, decoded at first use."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from txmq.batch.cells import body_cell, header_cell, headers_of
from txmq.batch.codecs import decompress
from txmq.batch.encode import TIME, pack_row
from txmq.batch.header import FIELDS, KEY, LENGTH, PREFIX, BatchHeader, read_header
from txmq.batch.layout import Column, locate, padded
from txmq.model.keys import key_hash, tag_bit, tag_filter
from txmq.model.message import NO_HEADERS, message_ids

BOUNDS = struct.Struct("<ii")  # of one cell, within the joined bytes


def offsets_of(buffer: bytes, column: Column, count: int) -> tuple[int, ...]:
    """Return the starts of a column's cells in its joined bytes, then the last end."""
    return struct.unpack_from(f"<{count + 1}i", buffer, column.offsets)


def cells_of(buffer: bytes, column: Column, count: int) -> list[bytes]:
    """Return the cells of an uncompressed column."""
    data = buffer[column.start : column.end]
    return [data[start:end] for start, end in pairwise(offsets_of(buffer, column, count))]


def texts_of(buffer: bytes, column: Column, count: int) -> list[str | None]:
    """Return the texts of a column, None for empty cells.

    Raises UnicodeDecodeError where one is not UTF-8.
    """
    data = buffer[column.start : column.end]
    # In ASCII, byte offsets are character offsets: one decode serves all cells.
    if data.isascii():
        text = data.decode()
        return [
            text[start:end] or None for start, end in pairwise(offsets_of(buffer, column, count))
        ]
    return [cell.decode() or None for cell in cells_of(buffer, column, count)]


def largest_body(buffer: bytes, header: BatchHeader) -> int:
    """Return the uncompressed size of the largest body in a verified batch."""
    if header.count == 1:
        return header.size
    offsets = offsets_of(buffer, locate(buffer, header).body, header.count)
    return max(end - start for start, end in pairwise(offsets))


class BatchView:
    """The rows of a verified batch, as one list per column."""

    def __init__(self, buffer: bytes, header: BatchHeader | None = None) -> None:
        self.buffer = buffer
        self.header = header or read_header(buffer)
        self._count = self.header.count
        self._layout = locate(buffer, self.header)

    def __len__(self) -> int:
        return self._count

    @property
    def tag_filter(self) -> int:
        """The filter bits of all tags."""
        return self.header.tag_filter

    def key_hashes(self) -> list[int | None]:
        """Return the hash of each row's key, None for a row without a key."""
        return key_hashes(self.buffer)

    @cached_property
    def bodies(self) -> list[bytes]:
        """The bodies. Raises RemoteProtocolError where they cannot be decompressed."""
        body = self._layout.body
        data = decompress(self.header.codec, self.buffer[body.start : body.end], self.header.size)
        return [
            data[start:end] for start, end in pairwise(offsets_of(self.buffer, body, self._count))
        ]

    def size_of(self, row: int) -> int:
        """Return the size of one body, which need not be decompressed for that."""
        start, end = BOUNDS.unpack_from(self.buffer, self._layout.body.offsets + 4 * row)
        return int(end - start)

    @cached_property
    def keys(self) -> list[str | None]:
        return self._texts(self._layout.key)

    @cached_property
    def tags(self) -> list[str | None]:
        return self._texts(self._layout.tag)

    @cached_property
    def headers(self) -> list[Mapping[str, str]]:
        if self._layout.headers is None:
            return [NO_HEADERS] * self._count
        return [headers_of(cell) for cell in self.header_cells]

    @cached_property
    def header_cells(self) -> list[bytes]:
        """The headers as the batch has them; b"" = none."""
        column = self._layout.headers
        return [b""] * self._count if column is None else cells_of(self.buffer, column, self._count)

    @cached_property
    def born_at(self) -> list[int]:
        return self._times(self._layout.born_at)

    @cached_property
    def deliver_at(self) -> list[int]:
        """Times of delivery; 0 = at once."""
        return self._times(self._layout.deliver_at)

    @cached_property
    def expire_at(self) -> list[int]:
        """Times of expiry; 0 = never."""
        return self._times(self._layout.expire_at)

    @cached_property
    def message_ids(self) -> list[str]:
        first = self.header.sequence
        return message_ids(self.header.producer_id, range(first, first + self._count))

    def _texts(self, column: Column | None) -> list[str | None]:
        return (
            [None] * self._count if column is None else texts_of(self.buffer, column, self._count)
        )

    def _times(self, at: int) -> list[int]:
        return (
            list(struct.unpack_from(f"<{self._count}q", self.buffer, at))
            if at
            else [0] * self._count
        )


class TaggedRows(Protocol):
    """Rows that may have tags."""

    @property
    def tag_filter(self) -> int:
        """The filter bits of all tags."""

    @property
    def tags(self) -> list[str | None]:
        """The tag of each row."""


def rows_with_tag(view: TaggedRows, tags: Collection[str]) -> list[int]:
    """Return the rows that have one of `tags`, in order.

    The filter in the header rules batches out; it never proves a match.
    """
    if not view.tag_filter & tag_filter(tags):
        return []
    return [row for row, tag in enumerate(view.tags) if tag in tags]


def key_hashes(buffer: bytes, header: BatchHeader | None = None) -> list[int | None]:
    """Return the hash of each row's key, None for a row without a key.

    Only the keys are decoded. `header` saves reading it again.
    """
    return [key_hash(cell) if cell else None for cell in key_cells(buffer, header)]


def key_cells(buffer: bytes, header: BatchHeader | None = None) -> list[bytes]:
    """Return each row's key in UTF-8, empty for a row without a key."""
    header = header or read_header(buffer)
    if not header.columns & KEY:
        return [b""] * header.count
    if header.count == 1:  # most batches of bundles: the key directly follows the header
        start, end = BOUNDS.unpack_from(buffer, LENGTH)
        return [buffer[LENGTH + BOUNDS.size + start : LENGTH + BOUNDS.size + end]]
    column = locate(buffer, header).key
    assert column is not None, "its flag is set"
    return cells_of(buffer, column, header.count)


def key_hash_at(read: Callable[[int, int], bytes], row: int) -> int | None:
    """Return the hash of one row's key, None where it has none.

    `read(at, size)` returns bytes of the verified batch, which need not be read as a
    whole for one key.
    """
    _version, _codec, columns, count, *_ = FIELDS.unpack_from(read(0, LENGTH), PREFIX.size)
    if not columns & KEY:
        return None
    start, end = BOUNDS.unpack(read(LENGTH + 4 * row, BOUNDS.size))
    data = padded(LENGTH + 4 * (count + 1))
    return key_hash(read(data + start, end - start)) if start < end else None


def edited_row(
    buffer: bytes,
    row: int,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    now: bool = False,
) -> bytes:
    """Return one row of a verified batch with another body, other headers, or both, as
    an uncompressed batch of its own. All else is as it was: id, key, tag and times.
    With `now` it has no times of delivery and expiry.

    Raises LocalProtocolError and MessageTooLarge for what no batch can hold.
    """
    alone = single_row(buffer, row)
    view = BatchView(alone)
    layout = locate(alone, view.header)
    key, tag, pairs = (_cell(alone, one, 0) for one in (layout.key, layout.tag, layout.headers))
    cells = (
        key,
        tag,
        pairs if headers is None else header_cell(headers),
        _cell(alone, layout.body, 0) if body is None else body_cell(body),
    )
    times = (view.born_at[0], *((0, 0) if now else (view.deliver_at[0], view.expire_at[0])))
    header = view.header
    producer = (header.producer_id, header.epoch, header.sequence)
    return pack_row(cells, times, header.tag_filter, producer)


def single_row(
    buffer: bytes, row: int, view: BatchView | None = None, *, body: bool = True
) -> bytes:
    """Return one row of a verified batch as an uncompressed batch of its own.

    It has the same producer and epoch, and its own sequence. Without `body` that is
    empty, and nothing is decompressed.
    """
    view = view or BatchView(buffer)
    header = view.header
    layout = locate(buffer, header)
    key, tag, headers = (
        _cell(buffer, column, row) for column in (layout.key, layout.tag, layout.headers)
    )
    content = b""
    if body:
        content = view.bodies[row] if header.codec else _cell(buffer, layout.body, row)
    starts = (layout.born_at, layout.deliver_at, layout.expire_at)
    born_at, deliver_at, expire_at = (
        TIME.unpack_from(buffer, at + 8 * row)[0] if at else 0 for at in starts
    )
    bits = tag_bit(tag.decode()) if tag else 0
    producer = (header.producer_id, header.epoch, header.sequence + row)
    times = born_at, deliver_at, expire_at
    return pack_row((key, tag, headers, content), times, bits, producer)


def _cell(buffer: bytes, column: Column | None, row: int) -> bytes:
    if column is None:
        return b""
    start, end = BOUNDS.unpack_from(buffer, column.offsets + 4 * row)
    return buffer[column.start + start : column.start + end]
