"""Flushes of a log as the bytes of slices, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

from txmq.store.log.segment import (
    HEADER_SIZE,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
)
from txmq.store.log.writer import Flush, SegmentWrite
from txmq.store.shared.records import Slice


class SegmentBytes(NamedTuple):
    """Whole records of one segment, behind its header where they begin it."""

    data: bytes
    begins_segment: bool


def segment_bytes(flush: Flush, log_id: UUID, end: int) -> Iterator[SegmentBytes]:
    """Yield the bytes of a flush that continues a log at `end`."""
    for write in flush.writes:
        data = b"".join(write.buffers)
        begins = write.start != end
        if begins:
            header = SegmentHeader(log_id, write.first, write.created_at)
            data = encode_segment_header(header) + data
        yield SegmentBytes(data, begins)
        end = write.end


def after(flush: Flush, position: int) -> Flush | None:
    """Return what a flush has from a position on, where one of its records begins."""
    writes = [_write_after(write, position) for write in flush.writes if write.end > position]
    return Flush(writes, flush.end) if writes else None


def _write_after(write: SegmentWrite, position: int) -> SegmentWrite:
    if write.start >= position:
        return write
    data = b"".join(write.buffers)[position - write.start :]
    return SegmentWrite(write.first, write.created_at, position, write.end, [data])


class SliceReader:
    """Collects the slices that count until their records are whole."""

    def __init__(self, first: int, created_at: int) -> None:
        """Set the log's last segment: its first position and its time of creation."""
        self._first, self._created_at = first, created_at
        self._slices: list[Slice] = []

    def cut(self) -> None:
        """Drop what is not whole: a claim came."""
        self._slices.clear()

    def add(self, part: Slice) -> Flush | None:
        """Take the next slice that counts; return the flush that it completes."""
        if part.data:  # else it says only that its leader lives
            self._slices.append(part)
        if part.whole != part.end or not self._slices:
            return None
        slices, self._slices = self._slices, []
        return Flush(self._writes(slices), part.end)

    def _writes(self, slices: list[Slice]) -> list[SegmentWrite]:
        writes: list[SegmentWrite] = []
        for part in slices:
            start, data = part.start, part.data
            if part.begins_segment:
                header = decode_segment_header(data, f"position {start} of the partition")
                assert header is not None, "the partition's checksum covers it"
                self._first, self._created_at = header.first, header.created_at
                start, data = start + HEADER_SIZE, data[HEADER_SIZE:]
            if part.begins_segment or not writes:
                writes.append(SegmentWrite(self._first, self._created_at, start, start))
            if data:
                writes[-1].buffers.append(data)
                writes[-1].end += len(data)
        return writes
