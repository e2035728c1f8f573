"""Verification of received batches.

The broker verifies before it stores. A stored batch therefore decodes everywhere: in
consumers, in Spark, and when the broker moves a single row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from txmq.batch.cells import headers_of, too_large
from txmq.batch.codecs import decompress
from txmq.batch.decode import BOUNDS, cells_of, offsets_of, texts_of
from txmq.batch.encode import TIME
from txmq.batch.header import KEY, LENGTH, BatchHeader, compute_checksum, read_header
from txmq.batch.layout import Column, Layout, locate
from txmq.errors import RemoteProtocolError
from txmq.model import limits
from txmq.model.keys import tag_filter

SIGN_32, SIGN_64 = b"\0\0\0\x80", b"\0\0\0\0\0\0\0\x80"
ORDER: Literal["little"] = "little"


def verify(buffer: bytes) -> BatchHeader:
    """Check all of `buffer` as one batch, and return its header.

    Raises MessageTooLarge where a body is beyond the limit, RemoteProtocolError for
    everything else.
    """
    header = read_header(buffer)
    if header.length != len(buffer):
        raise RemoteProtocolError(f"a batch of {header.length} bytes in a payload of {len(buffer)}")
    if compute_checksum(buffer) != header.checksum:
        raise RemoteProtocolError("a batch has a wrong checksum")
    if _is_simple_row(buffer, header):
        return header
    layout = locate(buffer, header)
    _check_bodies(buffer, header, layout.body)
    _check_texts(buffer, header, layout)
    if layout.headers:
        _check_offsets(buffer, header, layout.headers, "headers", limits.ALL_HEADERS)
        # Messages of one producer often have the same headers: each is checked once.
        for cell in set(cells_of(buffer, layout.headers, header.count)):
            headers_of(cell)
    _check_times(buffer, header, layout)
    return header


def _is_simple_row(buffer: bytes, header: BatchHeader) -> bool:
    """Return whether the batch is one valid row: a plain body, perhaps an ASCII key.

    Most sends are such batches. The general verification would take as long as the rest
    of the broker's work on a send. Where the answer is False, the general verification
    names the reason.
    """
    if (
        header.count != 1
        or header.codec
        or header.tag_filter
        or header.columns > KEY
        or header.size > limits.MESSAGE
    ):
        return False
    body = LENGTH
    if header.columns:
        start, end = BOUNDS.unpack_from(buffer, LENGTH)
        first = LENGTH + BOUNDS.size
        if start or not 0 <= end <= limits.KEY or not buffer[first : first + end].isascii():
            return False
        body = first + (end + 7 & -8)
    born_at = body + BOUNDS.size + (header.size + 7 & -8)
    if born_at + TIME.size != header.length or BOUNDS.unpack_from(buffer, body) != (0, header.size):
        return False
    (born,) = TIME.unpack_from(buffer, born_at)
    return bool(0 <= born <= header.born_at)


def _check_bodies(buffer: bytes, header: BatchHeader, body: Column) -> None:
    _check_offsets(buffer, header, body, "body", header.size)
    if header.size > limits.MESSAGE:
        largest = max(
            end - start for start, end in pairwise(offsets_of(buffer, body, header.count))
        )
        if largest > limits.MESSAGE:
            raise too_large("message", largest, limits.MESSAGE)
    if header.codec:
        decompress(header.codec, buffer[body.start : body.end], header.size)


def _check_offsets(
    buffer: bytes, header: BatchHeader, column: Column, kind: str, limit: int
) -> None:
    if not offsets_rise(buffer[column.offsets : column.offsets + 4 * (header.count + 1)], limit):
        raise RemoteProtocolError(
            f"a batch has a {kind} of negative length, or of more than {limit} bytes"
        )


def _check_texts(buffer: bytes, header: BatchHeader, layout: Layout) -> None:
    filter_ = 0
    try:
        if layout.key:
            _check_offsets(buffer, header, layout.key, "key", limits.KEY)
            if not buffer[layout.key.start : layout.key.end].isascii():
                texts_of(buffer, layout.key, header.count)
        if layout.tag:
            _check_offsets(buffer, header, layout.tag, "tag", limits.TAG)
            filter_ = tag_filter(tag for tag in texts_of(buffer, layout.tag, header.count) if tag)
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"a key or tag is not UTF-8: {error.reason}") from error
    if filter_ != header.tag_filter:
        raise RemoteProtocolError("the tag filter of a batch is not that of its tags")


def _check_times(buffer: bytes, header: BatchHeader, layout: Layout) -> None:
    columns = (
        (layout.born_at, header.born_at),
        (layout.deliver_at, limits.TIME),
        (layout.expire_at, limits.TIME),
    )
    for at, latest in columns:
        if at and not all_within(buffer[at : at + 8 * header.count], latest):
            raise RemoteProtocolError(f"a batch has a time out of range: 0 to {latest} is possible")


# Bounds of a whole column of numbers, in a few operations on one big integer. All its
# numbers are non-negative, so the top bit of each is free. Set in the minuend, that bit
# takes the borrow which would run into the next number: after the subtraction it is
# gone exactly where the subtrahend was larger. A thousand numbers take 10 µs that way,
# against 60 µs one by one.


def offsets_rise(numbers: bytes, limit: int) -> bool:
    """Return whether int32 numbers begin at 0 and rise by 0 to `limit` each."""
    signs = int.from_bytes(SIGN_32 * (len(numbers) // 4 - 1), ORDER)
    later, earlier = int.from_bytes(numbers[4:], ORDER), int.from_bytes(numbers[:-4], ORDER)
    if any(numbers[:4]) or later & signs:
        return False
    steps = (later | signs) - earlier
    if steps & signs != signs:
        return False
    largest = (signs >> 31) * limit
    return ((largest | signs) - (steps ^ signs)) & signs == signs


def all_within(numbers: bytes, limit: int) -> bool:
    """Return whether int64 numbers are all from 0 to `limit`."""
    signs = int.from_bytes(SIGN_64 * (len(numbers) // 8), ORDER)
    values, largest = int.from_bytes(numbers, ORDER), (signs >> 63) * limit
    return not values & signs and ((largest | signs) - values) & signs == signs
