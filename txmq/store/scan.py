"""Reading records one after the other, and finding where they go on after damage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from txmq.errors import CorruptRecord, UnsupportedFormat
from txmq.store.fs import File
from txmq.store.record import (
    MAGIC,
    MAX_BODY,
    VERSION,
    VERSION_AT,
    Fault,
    Record,
    decode,
    record_size,
    wanted,
)
from txmq.store.segment import HEADER_SIZE as SEGMENT_HEADER_SIZE

# Large enough that the cost of a read is nothing beside that of its records, small
# enough to stay in the cache.
CHUNK = 4 << 20
# Most records are smaller: one read is enough.
_FIRST_READ = 4096


class Damage(NamedTuple):
    """Positions `position` to `end` of the log, in the file `path`, cannot be read."""

    path: str
    position: int
    end: int
    reason: str


class SegmentScan:
    """Reads the records of one segment file, whose byte 0 stands for the position
    `first`.
    """

    def __init__(self, file: File, first: int) -> None:
        self._file = file
        self._first = first

    def walk(self, start: int, bound: int) -> Iterator[Record | Damage]:
        """What stands between two positions: `start`, where a record begins, and
        `bound`, where one ends.

        Nothing is ever skipped silently: a span that is no records comes as a Damage
        that reaches to the next record whose checksum and position are right. A file
        that ends before `bound` is damaged from there.
        """
        reach = min(bound, self._first + self._file.size())
        position = max(start, self._first + SEGMENT_HEADER_SIZE)
        size = CHUNK
        while position < reach:
            data = self._read(position, min(size, reach - position))
            at = 0
            while not isinstance(found := decode(data, at, position + at), Fault):
                yield found
                at += record_size(len(found.body))
            position += at
            needed = wanted(data, at)
            if found is Fault.SHORT and position + needed <= reach and (at or needed > size):
                # Only the chunk has ended, not the record: the next chunk begins with
                # it and is large enough.
                size = max(CHUNK, needed)
            elif position < reach:
                damage = self._damage(position, reach, bound, self._reason(found, data, at))
                yield damage
                position = damage.end
        if position < bound:
            yield Damage(self._file.path, position, bound, "the file ends here")

    def record_at(self, position: int) -> Record:
        """The record that begins at a position. Raises CorruptRecord."""
        data = self._read(position, _FIRST_READ)
        found = decode(data, 0, position)
        if found is Fault.SHORT and (needed := wanted(data, 0)) > _FIRST_READ:
            data = self._read(position, needed)
            found = decode(data, 0, position)
        if isinstance(found, Fault):
            raise CorruptRecord(self._file.path, position, self._reason(found, data, 0))
        return found

    def next_record(self, position: int, bound: int) -> int:
        """Where the first record after `position` begins; `bound` if there is none
        before it.
        """
        for candidate in self._magics(position + 8, bound):
            end = self._end_of(candidate)
            if end is not None and end <= bound:
                return candidate
        return bound

    def ends_at(self, position: int) -> bool:
        """Whether a record ends at a position, or none can: it is the first of the
        segment.
        """
        lowest = max(self._first + SEGMENT_HEADER_SIZE, position - record_size(MAX_BODY))
        for stop in range(position, lowest, -CHUNK):
            start = max(lowest, stop - CHUNK)
            data = self._read(start, stop - start)
            at = data.rfind(MAGIC)
            while at >= 0:
                if at % 8 == 0 and self._end_of(start + at) == position:
                    return True
                at = data.rfind(MAGIC, 0, at)
        return position <= self._first + SEGMENT_HEADER_SIZE

    def blank(self, start: int, bound: int) -> bool:
        """Whether there is nothing but zeros between two positions."""
        chunks = (
            self._read(position, min(CHUNK, bound - position))
            for position in range(start, bound, CHUNK)
        )
        return not any(chunk.strip(b"\0") for chunk in chunks)

    def _end_of(self, position: int) -> int | None:
        try:
            return self.record_at(position).end
        except CorruptRecord:
            return None

    def _damage(self, position: int, reach: int, bound: int, reason: str) -> Damage:
        end = self.next_record(position, reach)
        return Damage(self._file.path, position, end if end < reach else bound, reason)

    def _magics(self, start: int, bound: int) -> Iterator[int]:
        for position in range(start, bound, CHUNK):
            data = self._read(position, min(CHUNK, bound - position))
            at = data.find(MAGIC)
            while at >= 0:
                if at % 8 == 0:  # records are aligned, and so are chunks: none is cut in two
                    yield position + at
                at = data.find(MAGIC, at + 1)

    def _reason(self, fault: Fault, data: bytes, at: int) -> str:
        if fault is Fault.VERSION:
            raise UnsupportedFormat(self._file.path, data[at + VERSION_AT], VERSION)
        return str(fault.value)

    def _read(self, position: int, length: int) -> bytes:
        return self._file.pread(length, position - self._first)
