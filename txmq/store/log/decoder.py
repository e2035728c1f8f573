"""Decoding of a segment's records in sequence, past damage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from txmq.errors import CorruptRecord, UnsupportedFormat
from txmq.store.filesystem import File
from txmq.store.log.record import (
    MAGIC,
    MAX_BODY,
    VERSION,
    VERSION_AT,
    Record,
    RecordFault,
    decode,
    needed_size,
    record_size,
)
from txmq.store.log.segment import HEADER_SIZE as SEGMENT_HEADER_SIZE

# Large enough that a read costs little beside its records, small enough for the CPU
# cache.
CHUNK = 4 << 20
# Most records are smaller: one read is enough.
_FIRST_READ = 4096


class Damage(NamedTuple):
    """An unreadable span of the log, in the file `path`."""

    path: str
    position: int
    end: int
    reason: str


class SegmentDecoder:
    """Decoder of one segment file, whose byte 0 is the position `first`."""

    def __init__(self, file: File, first: int) -> None:
        self._file = file
        self._first = first

    def scan(self, start: int, bound: int) -> Iterator[Record | Damage]:
        """Yield records and damages from `start` to `bound`, both ends of records.

        Nothing is skipped silently: a span that holds no records is yielded as a Damage
        that reaches to the next valid record. A file that ends before `bound` is
        damaged from there on.
        """
        file_end = min(bound, self._first + self._file.size())
        position = max(start, self._first + SEGMENT_HEADER_SIZE)
        size = CHUNK
        while position < file_end:
            data = self._read(position, min(size, file_end - position))
            at = 0
            while not isinstance(result := decode(data, at, position + at), RecordFault):
                yield result
                at += record_size(len(result.body))
            position += at
            needed = needed_size(data, at)
            if (
                result is RecordFault.SHORT
                and position + needed <= file_end
                and (at or needed > size)
            ):
                # The chunk ended within a record: the next chunk begins with that
                # record and is large enough for it.
                size = max(CHUNK, needed)
            elif position < file_end:
                damage = self._damage(position, file_end, bound, self._reason(result, data, at))
                yield damage
                position = damage.end
        if position < bound:
            yield Damage(self._file.path, position, bound, "the file ends here")

    def record_at(self, position: int) -> Record:
        """Return the record that begins at a position. Raises CorruptRecord."""
        data = self._read(position, _FIRST_READ)
        result = decode(data, 0, position)
        if result is RecordFault.SHORT and (needed := needed_size(data, 0)) > _FIRST_READ:
            data = self._read(position, needed)
            result = decode(data, 0, position)
        if isinstance(result, RecordFault):
            raise CorruptRecord(self._file.path, position, self._reason(result, data, 0))
        return result

    def next_record(self, position: int, bound: int) -> int:
        """Return where the first record after `position` begins, else `bound`."""
        for candidate in self._magics(position + 8, bound):
            end = self._end_of(candidate)
            if end is not None and end <= bound:
                return candidate
        return bound

    def record_ends_at(self, position: int) -> bool:
        """Return whether a record ends at `position`, or the first one begins there."""
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

    def is_zero(self, start: int, bound: int) -> bool:
        """Return whether all bytes between two positions are zero."""
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

    def _damage(self, position: int, file_end: int, bound: int, reason: str) -> Damage:
        end = self.next_record(position, file_end)
        return Damage(self._file.path, position, end if end < file_end else bound, reason)

    def _magics(self, start: int, bound: int) -> Iterator[int]:
        for position in range(start, bound, CHUNK):
            data = self._read(position, min(CHUNK, bound - position))
            at = data.find(MAGIC)
            while at >= 0:
                if at % 8 == 0:  # records and chunks are aligned: no magic is cut in two
                    yield position + at
                at = data.find(MAGIC, at + 1)

    def _reason(self, fault: RecordFault, data: bytes, at: int) -> str:
        if fault is RecordFault.VERSION:
            raise UnsupportedFormat(self._file.path, data[at + VERSION_AT], VERSION)
        return str(fault.value)

    def _read(self, position: int, length: int) -> bytes:
        return self._file.pread(length, position - self._first)
