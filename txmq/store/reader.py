"""Reading segments that are part of an open log, by position. Any thread may read."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict

from txmq.errors import CorruptRecord, StoreError
from txmq.store.fs import File, FileSystem
from txmq.store.record import Record
from txmq.store.scan import SegmentScan
from txmq.store.segment import segment_path

# File handles are shared with the connections: a log of many segments must not use them
# up.
MAX_OPEN = 64


class LogReader:
    """Files of segments, opened when they are needed; those used least recently are
    closed.
    """

    def __init__(self, fs: FileSystem, directory: str, firsts: list[int]) -> None:
        self._fs = fs
        self._directory = directory
        self._firsts = firsts
        self._lock = threading.Lock()
        self._files: OrderedDict[int, File] = OrderedDict()

    def read(self, position: int, length: int) -> bytes:
        """Bytes of the log, unchecked. Raises CorruptRecord where a file ends too
        soon.
        """
        parts = [self._read_part(*part) for part in self._parts(position, length)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_cached(self, position: int, length: int) -> bytes | None:
        """As `read`, but None where that would have to wait for the disk, or would
        fail.
        """
        parts = []
        for first, start, count in self._parts(position, length):
            data = self._file(first).pread_cached(count, start - first)
            if data is None:
                return None
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def record_at(self, position: int) -> Record:
        """The record that begins at a position. Raises CorruptRecord."""
        return self.scan(self._firsts[self._index(position)]).record_at(position)

    def scan(self, first: int) -> SegmentScan:
        """The records of the segment that begins at `first`."""
        return SegmentScan(self._file(first), first)

    def add(self, first: int) -> None:
        """Read from one more segment, which begins where the last one ends."""
        self._firsts = [*self._firsts, first]

    def forget(self, first: int) -> None:
        """Read no more from the segment that begins at `first`; its file is closed as
        soon as nobody reads it.
        """
        with self._lock:
            self._firsts = [other for other in self._firsts if other != first]
            self._files.pop(first, None)

    def _parts(self, position: int, length: int) -> list[tuple[int, int, int]]:
        """A span as parts, each within one segment: the segment's first position, the
        part's, and its length.
        """
        firsts, end = self._firsts, position + length
        at = self._index(position)
        parts = []
        while at + 1 < len(firsts) and firsts[at + 1] < end:
            parts.append((firsts[at], position, firsts[at + 1] - position))
            at, position = at + 1, firsts[at + 1]
        return [*parts, (firsts[at], position, end - position)]

    def _index(self, position: int) -> int:
        at = bisect_right(self._firsts, position) - 1
        if at < 0:
            raise StoreError(
                f"{self._directory}: position {position} is no longer in the log, which begins at {self._firsts[0]}"
            )
        return at

    def _read_part(self, first: int, position: int, length: int) -> bytes:
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
                # Only the reference goes: another thread may be reading, and the last
                # to let go closes the file.
                self._files.popitem(last=False)
            return file
