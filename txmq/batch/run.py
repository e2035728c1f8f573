"""Runs: neighbouring stored batches, read as one.

Messages that were sent one by one are stored as many small batches. Only times follow
the body of a batch of one plain row, so its body is found without its other columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, repeat
from typing import TypeVar

from txmq.batch.decode import BatchView, key_cells
from txmq.batch.header import EXPIRE_AT, HEADERS, KEY, LENGTH, MAGIC, TAG, VERSION, Codec
from txmq.errors import RemoteProtocolError
from txmq.model.keys import key_hash
from txmq.model.message import NO_HEADERS, message_ids

# magic, version, codec, columns, count, length, size of the bodies
HEAD = struct.Struct("<4s4xBBHIII")
FILTER = struct.Struct("<32xQ")
PRODUCER = struct.Struct("<40x16s8xQ")  # producer id, sequence
KEY_END = struct.Struct(f"<{LENGTH + 4}xI")  # of the key of a batch of one row that has one
KEY_AT = LENGTH + 8
# bytes after the body of one row: born_at; with deliver_at; with expire_at; with both
TIMES = (8, 16, 16, 24)
T = TypeVar("T")


class RunView:
    """The rows of several verified batches, with the columns of `BatchView`."""

    def __init__(
        self, buffer: bytes, rows: Sequence[int], lengths: Sequence[int], times: Sequence[int]
    ) -> None:
        """Read the heads of the batches in `buffer`; rows, lengths and times are known.

        Raises RemoteProtocolError where the batches in it have other ones.
        """
        self._buffer, self._rows, self._times = buffer, rows, times
        self._starts = list(accumulate(lengths, initial=0))[:-1]
        try:
            self._heads = [HEAD.unpack_from(buffer, start) for start in self._starts]
        except struct.error as error:
            raise RemoteProtocolError("a run of batches ends too early") from error
        magics, versions, codecs, columns, counts, header_lengths, _sizes = zip(
            *self._heads, strict=True
        )
        valid = set(magics) == {MAGIC} and set(versions) == {VERSION} and max(codecs) <= Codec.LZ4
        if (
            not valid
            or max(columns) >= 2 * EXPIRE_AT
            or counts != tuple(rows)
            or header_lengths != tuple(lengths)
        ):
            raise RemoteProtocolError("a run of batches has other batches than its chunk says")

    def __len__(self) -> int:
        return sum(self._rows)

    @property
    def tag_filter(self) -> int:
        """The filter bits of all tags."""
        bits = 0
        for start in self._starts:
            bits |= FILTER.unpack_from(self._buffer, start)[0]
        return bits

    @cached_property
    def bodies(self) -> list[bytes]:
        """The bodies. Raises RemoteProtocolError where they cannot be decompressed."""
        buffer, bodies = self._buffer, list[bytes]()
        for start, (_magic, _version, codec, columns, count, length, size) in zip(
            self._starts, self._heads, strict=True
        ):
            if count == 1 and not codec:
                at = start + length - TIMES[columns >> 3] - (size + 7 & -8)
                bodies.append(buffer[at : at + size])
            else:
                bodies += BatchView(buffer[start : start + length]).bodies
        return bodies

    @cached_property
    def keys(self) -> list[str | None]:
        return [cell.decode() or None for cell in self._key_cells]

    @cached_property
    def tags(self) -> list[str | None]:
        return self._column(TAG, None, lambda view: view.tags)

    @cached_property
    def headers(self) -> list[Mapping[str, str]]:
        return self._column(HEADERS, NO_HEADERS, lambda view: view.headers)

    @cached_property
    def born_at(self) -> list[int]:
        born = list[int]()
        for start, (*_, columns, count, length, _size) in zip(
            self._starts, self._heads, strict=True
        ):
            at = start + length - TIMES[columns >> 3] * count
            born += struct.unpack_from(f"<{count}q", self._buffer, at)
        return born

    @cached_property
    def message_ids(self) -> list[str]:
        producers = (PRODUCER.unpack_from(self._buffer, start) for start in self._starts)
        ids = list[str]()
        for (producer_id, first), rows in zip(producers, self._rows, strict=True):
            ids += message_ids(producer_id, range(first, first + rows))
        return ids

    @cached_property
    def stored_at(self) -> list[int]:
        """Storage time of each row's batch."""
        return list(chain.from_iterable(map(repeat, self._times, self._rows)))

    def key_hashes(self) -> list[int | None]:
        """Return the hash of each row's key, None for a row without a key."""
        return [key_hash(cell) if cell else None for cell in self._key_cells]

    @cached_property
    def _key_cells(self) -> list[bytes]:
        buffer, cells = self._buffer, list[bytes]()
        for start, (*_, columns, count, length, _size) in zip(
            self._starts, self._heads, strict=True
        ):
            if not columns & KEY:
                cells += repeat(b"", count)
            elif count == 1:
                cells.append(
                    buffer[start + KEY_AT : start + KEY_AT + KEY_END.unpack_from(buffer, start)[0]]
                )
            else:
                cells += key_cells(buffer[start : start + length])
        return cells

    def _column(self, flag: int, absent: T, of: Callable[[BatchView], list[T]]) -> list[T]:
        return list(chain.from_iterable(self._cells(flag, absent, of)))

    def _cells(
        self, flag: int, absent: T, of: Callable[[BatchView], list[T]]
    ) -> Iterator[Sequence[T]]:
        for start, (*_, columns, count, length, _size) in zip(
            self._starts, self._heads, strict=True
        ):
            present = columns & flag
            yield (
                of(BatchView(self._buffer[start : start + length])) if present else [absent] * count
            )
