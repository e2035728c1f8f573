"""Reads by position from the segments of an open log, in any thread."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict

from txmq.errors import CorruptRecord, StoreError
from txmq.store.filesystem import File, FileSystem
from txmq.store.log.decoder import SegmentDecoder
from txmq.store.log.record import Record
from txmq.store.log.segment import segment_path

# Connections need file descriptors too: a log of many segments must leave them some.
MAX_OPEN = 64


class LogReader:
    """A cache of open segment files; the least recently used ones are closed."""

    def __init__(self, fs: FileSystem, directory: str, firsts: list[int]) -> None:
        self._fs = fs
        self._directory = directory
        self._firsts = firsts
        self._lock = threading.Lock()
        self._files: OrderedDict[int, File] = OrderedDict()

    def read(self, position: int, length: int) -> bytes:
        """Return bytes of the log, unchecked.

        Raises CorruptRecord where a file ends too early.
        """
        chunks = [self._read_segment(*span) for span in self._split_by_segment(position, length)]
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def read_cached(self, position: int, length: int) -> bytes | None:
        """Return as `read` does, but None where it would wait for the disk, or fail."""
        chunks = []
        for first, start, count in self._split_by_segment(position, length):
            data = self._file(first).pread_cached(count, start - first)
            if data is None:
                return None
            chunks.append(data)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def record_at(self, position: int) -> Record:
        """Return the record that begins at a position. Raises CorruptRecord."""
        return self.decoder(self.segment_of(position)).record_at(position)

    def segment_of(self, position: int) -> int:
        """Return the first position of the segment that has a position."""
        return self._firsts[self._index(position)]

    def decoder(self, first: int) -> SegmentDecoder:
        """Return a decoder of the segment that begins at `first`."""
        return SegmentDecoder(self._file(first), first)

    def add(self, first: int) -> None:
        """Add a segment, which begins where the last one ends."""
        self._firsts = [*self._firsts, first]

    def forget(self, first: int) -> None:
        """Drop the segment that begins at `first`; its last read closes the file."""
        with self._lock:
            self._firsts = [other for other in self._firsts if other != first]
            self._files.pop(first, None)

    def _split_by_segment(self, position: int, length: int) -> list[tuple[int, int, int]]:
        """Return a span cut by segments: (segment's first position, start, length)."""
        firsts, end = self._firsts, position + length
        at = self._index(position)
        chunks = []
        while at + 1 < len(firsts) and firsts[at + 1] < end:
            chunks.append((firsts[at], position, firsts[at + 1] - position))
            at, position = at + 1, firsts[at + 1]
        return [*chunks, (firsts[at], position, end - position)]

    def _index(self, position: int) -> int:
        at = bisect_right(self._firsts, position) - 1
        if at < 0:
            raise StoreError(
                f"{self._directory}: position {position} is no longer in the log,"
                f" which begins at {self._firsts[0]}"
            )
        return at

    def _read_segment(self, first: int, position: int, length: int) -> bytes:
        file = self._file(first)
        data = file.pread(length, position - first)
        if len(data) < length:
            raise CorruptRecord(file.path, position + len(data), "the file ends here")
        return data

    def _file(self, first: int) -> File:
        with self._lock:
            file = self._files.pop(first, None)
            if file is None:
                file = self._fs.open(segment_path(self._directory, first))
            self._files[first] = file
            if len(self._files) > MAX_OPEN:
                # Only this reference goes: another thread may be reading the file, and
                # the last reference closes it.
                self._files.popitem(last=False)
            return file
