"""The blocking part of the log: writes, syncs, zeros ahead, new segments.

A sync that changes no metadata is faster, so a write that finds the end of the file
adds zeros for those that follow. No thread writes zeros beside: a sync brings all of a
file to disk, and records would wait for them.

Any thread may call it; calls wait for one another. A failed write or fsync of records
is final: after an error the kernel regards the pages as clean, and a second fsync would
succeed with the data lost. Zeros written ahead and the file of a new segment hold no
records: where these fail for lack of space, they may be tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple
from uuid import UUID

from txmq.errors import DiskFull, StoreClosed, StoreError
from txmq.store.filesystem import Bytes, File, FileSystem
from txmq.store.log.latency import Latencies
from txmq.store.log.segment import HEADER_SIZE, SegmentHeader, create_segment, segment_path

# Of a step: the zeros that a write adds where it finds none. Its sync carries them, and
# 1 MiB takes a quick disk 3 ms. It also brings the file's new size to disk, so that
# many syncs with few zeros would take longer.
_PARTS, _MOST_PARTS = 16, 64


@dataclass(slots=True)
class SegmentWrite:
    """Buffers for one segment, contiguous from the position `start` to `end`."""

    first: int
    created_at: int
    start: int
    end: int
    buffers: list[Bytes] = field(default_factory=list)


class Flush(NamedTuple):
    """The records between two cuts; `end` is the position after them."""

    writes: list[SegmentWrite]
    end: int


class Sizes(NamedTuple):
    """Bytes of the largest segment, and of one step of zeros ahead of the records."""

    segment: int
    step: int


class Tail(NamedTuple):
    """The last segment: its first position, the end of its records, its file size."""

    first: int
    end: int
    size: int


class LogWriter:
    """Writer of the last segment of a log.

    `first` is the first position of the last segment file. Records are written up to
    the position `end`, and on disk up to `synced`. Unless `accepting`, no record may be
    appended, and `refusal` returns the error. `read_only` means that only space is
    lacking, which `try_space` may find.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        log_id: UUID,
        sizes: Sizes,
        tail: Tail,
        require_held: Callable[[], None],
    ) -> None:
        """`require_held` raises where another process writes this log."""
        self._fs = fs
        self._require_held = require_held
        self._directory = directory
        self._log_id = log_id
        self._sizes = sizes
        self._lock = threading.Lock()
        self._file = fs.open(segment_path(directory, tail.first), write=True)
        self.first, self.end, self._zeroed = tail
        self._failure = ""
        self._making_room = False  # only then may what found no space be tried again
        self.synced = tail.end
        self.accepting = True
        self.read_only = False
        self.limit_zeros(sizes.step)
        self.written = 0  # bytes, since the log was opened
        self.latencies = Latencies()  # of writes that were synced

    @property
    def busy(self) -> bool:
        """True while a call runs in some thread: another one would wait for it."""
        return self._lock.locked()

    def refusal(self) -> StoreError:
        """Return the error for a call that is no longer possible."""
        if self.read_only:
            return DiskFull(
                f"{self._directory}: no space for the log",
                hint="free space on that disk; the broker then continues by itself",
            )
        return StoreClosed(
            f"{self._directory}: the log {self._failure}",
            hint="restart the broker: it recovers what is on disk",
        )

    def write(self, flush: Flush, *, sync: bool) -> None:
        """Write the records of a flush; with `sync`, return once they are on disk.

        DiskFull with `read_only` set means that the log is whole but has no room. Write
        the same flush again once `try_space` has returned True. Any other error is
        final.
        """
        self._attempt(self._write, flush, sync)

    def sync(self) -> None:
        """Return once everything written is on disk."""
        self._attempt(self._sync)

    def limit_zeros(self, most: int) -> None:
        """Let writes add about `most` bytes of zeros, and larger writes none."""
        part = self._sizes.step // _PARTS
        self._large = min(most, part)
        self._zeros = min(max(most, self._sizes.step // _MOST_PARTS), part)

    def try_space(self) -> bool:
        """Return whether there is space again; if so, accept records again.

        A step of zeros has to have room, so that a full disk is left behind by more
        than the next record needs.
        """
        try:
            self._attempt(self._find_space)
        except DiskFull:
            return False
        return True

    def close(self) -> None:
        """Close the file; unwritten records are lost. Idempotent."""
        with self._lock:
            if self.accepting or self.read_only:
                self.accepting, self.read_only, self._failure = False, False, "is closed"
            self._file.close()

    def _attempt(self, step: Callable[..., None], *args: object) -> None:
        """Carry out a step, and record a failure of it.

        Lack of room ends once there is some; any other failure is final.
        """
        with self._lock:
            if not (self.accepting or self.read_only):
                raise self.refusal()
            try:
                step(*args)
            except BaseException as error:
                self.accepting = False
                self.read_only = self._making_room and isinstance(error, DiskFull)
                self._making_room = False
                if not self.read_only:
                    self._failure = f"failed: {error}"
                raise

    def _write(self, flush: Flush, sync: bool) -> None:  # noqa: FBT001  # of `write`
        started, before = perf_counter(), self.end
        self._require_held()
        for write in flush.writes:
            if write.end > self.end:  # else an earlier attempt wrote it before DiskFull
                self._write_segment(write)
        self.written += self.end - before
        if sync:
            self._sync()
            self.latencies.observe(perf_counter() - started)
        else:
            self._require_held()

    def _find_space(self) -> None:
        size = min(self.end - self.first + self._sizes.step, self._sizes.segment)
        if size > self._zeroed:
            self._extend(size)
            self._sync()
        self.read_only, self.accepting = False, True

    def _write_segment(self, write: SegmentWrite) -> None:
        if write.first != self.first:
            self._roll(write)
        size = write.end - self.first
        if size > self._zeroed:
            # A large write is followed by others, which would write over the zeros.
            zeros = self._zeros if write.end - self.end < self._large else 0
            self._extend(max(size, min(size + zeros, self._sizes.segment)))
        self._file.pwrite(write.buffers, write.start - self.first)
        self.end = write.end

    def _roll(self, write: SegmentWrite) -> None:
        # The name of the next segment proves that this one is whole on disk: seal this
        # one first.
        self._file.truncate(write.first - self.first)
        self._file.fsync()
        self.synced, self._zeroed = write.first, write.first - self.first
        header = SegmentHeader(self._log_id, write.first, write.created_at)
        file = self._create(header)
        self._file.close()
        self._file, self.first, self._zeroed = file, write.first, HEADER_SIZE

    def _create(self, header: SegmentHeader) -> File:
        self._making_room = True
        try:
            file = create_segment(self._fs, self._directory, header)
        except DiskFull:
            # The name may not exist. If it does and stays, the next attempt reports it.
            with suppress(StoreError):
                self._fs.remove(segment_path(self._directory, header.first))
            raise
        self._making_room = False
        return file

    def _extend(self, size: int) -> None:
        self._making_room = True
        self._file.write_zeros(self._zeroed, size - self._zeroed)
        self._making_room = False
        self._zeroed = size

    def _sync(self) -> None:
        self._file.fdatasync()
        # Before anybody counts on it: a newer process may have written over it.
        self._require_held()
        self.synced = self.end
