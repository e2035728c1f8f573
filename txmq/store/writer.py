"""The half of the log that blocks: it writes, syncs, makes room, and goes on to the
next segment.

Any thread may call it; calls wait for one another. A failed write or fsync of records
is final: after an error the kernel takes the pages for clean, and a second fsync would
succeed with the data lost. Only making room (zeros written ahead, the file of a new
segment) may fail for lack of space and be tried again, since no record is touched by
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, TypeVar
from uuid import UUID

from txmq.errors import DiskFull, StoreClosed, StoreError
from txmq.store.fs import Bytes, File, FileSystem
from txmq.store.latency import Latencies
from txmq.store.segment import HEADER_SIZE, SegmentHeader, create_segment, segment_path

T = TypeVar("T")
# Where a write itself has to make room it takes a part of a step only: whoever waits
# for it should not wait for all.
_PARTS = 16


@dataclass(slots=True)
class Run:
    """Bytes for one segment: `buffers`, one after the other, from the position `start`
    to `end`.
    """

    first: int
    created_at: int
    start: int
    end: int
    buffers: list[Bytes] = field(default_factory=list)


class Flush(NamedTuple):
    """What was appended between two cuts; `end` is the position after it."""

    runs: list[Run]
    end: int

    @property
    def size(self) -> int:
        """How many bytes it writes."""
        return sum(run.end - run.start for run in self.runs)


class Sizes(NamedTuple):
    """In bytes: the largest segment, and the step in which zeros are written ahead of
    the records.
    """

    segment: int
    step: int


class Tail(NamedTuple):
    """The last segment: its first position, the position where its records end, the
    size of its file.
    """

    first: int
    end: int
    size: int


class LogWriter:
    """Writes to the last segment of a log.

    `first` is where the last segment file begins; records are written up to the
    position `end`, and on disk up to `synced`. Where not `accepting`, no record may be
    appended, and `refusal` says why; where `read_only`, for lack of space only, and
    `try_space` may find some.
    """

    def __init__(
        self, fs: FileSystem, directory: str, log_id: UUID, sizes: Sizes, tail: Tail
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._log_id = log_id
        self._sizes = sizes
        self._lock = threading.Lock()
        self._file = fs.open(segment_path(directory, tail.first), write=True)
        self.first, self.end, self._zeroed = tail
        self._why = ""
        self.synced = tail.end
        self.accepting = True
        self.read_only = False
        self.written = 0  # bytes, since the log was opened
        self.latencies = Latencies()  # of writes that were synced

    @property
    def busy(self) -> bool:
        """Whether a call is under way in some thread: another would wait for it."""
        return self._lock.locked()

    @property
    def wants_room(self) -> bool:
        """Whether `reserve` should be called, at leisure, so that writes need not make
        room themselves.
        """
        room = self._zeroed - (self.end - self.first)
        return room < self._sizes.step // 2 and self._zeroed < self._sizes.segment

    def refusal(self) -> StoreError:
        """The error for whoever asks for what is no longer possible."""
        if self.read_only:
            return DiskFull(
                f"{self._directory}: no space for the log to grow",
                hint="free space on that disk; the broker goes on by itself",
            )
        return StoreClosed(
            f"{self._directory}: the log {self._why}",
            hint="start the broker again: it recovers what is on disk",
        )

    def write(self, flush: Flush, *, sync: bool) -> None:
        """Write the records of a flush and, unless told otherwise, return only when
        they are on disk.

        DiskFull with `read_only` set: there was no room, the log is whole; give the
        same flush again once `try_space` has found some. After any other error the log
        is of no more use.
        """
        with self._lock:
            self._check_fit()
            began, before = perf_counter(), self.end
            for run in flush.runs:
                if run.end > self.end:  # else written before there was no room for the rest
                    self._write_run(run)
            self.written += self.end - before
            if sync:
                self._sync()
                self.latencies.observe(perf_counter() - began)

    def sync(self) -> None:
        """Return when all that was written is on disk."""
        with self._lock:
            self._check_fit()
            self._sync()

    def reserve(self) -> None:
        """Write zeros ahead. Raises DiskFull, with `read_only` set, where there is no
        space for them.
        """
        with self._lock:
            self._check_fit()
            size = min(self.end - self.first + self._sizes.step, self._sizes.segment)
            if size > self._zeroed:
                self._extend(size)
                self._sync()
            self.read_only, self.accepting = False, True

    def try_space(self) -> bool:
        """Whether there is space again; if so, records are accepted again."""
        try:
            self.reserve()
        except DiskFull:
            return False
        return True

    def close(self) -> None:
        """Close the file; what was not written is not written. Again is fine."""
        with self._lock:
            if self.accepting or self.read_only:
                self.accepting, self.read_only, self._why = False, False, "is closed"
            self._file.close()

    def _write_run(self, run: Run) -> None:
        if run.first != self.first:
            self._roll(run)
        size = run.end - self.first
        if size > self._zeroed:
            part = self._sizes.step // _PARTS
            self._extend(max(size, min(size + part, self._sizes.segment)))
        self._attempt(self._file.pwrite, run.buffers, run.start - self.first)
        self.end = run.end

    def _roll(self, run: Run) -> None:
        # That the next segment's name is there will prove that this one was whole on
        # disk: so seal it first.
        self._attempt(self._file.truncate, run.first - self.first)
        self._attempt(self._file.fsync)
        self.synced, self._zeroed = run.first, run.first - self.first
        header = SegmentHeader(self._log_id, run.first, run.created_at)
        file = self._attempt(self._create, header, making_room=True)
        self._attempt(self._file.close)
        self._file, self.first, self._zeroed = file, run.first, HEADER_SIZE

    def _create(self, header: SegmentHeader) -> File:
        try:
            return create_segment(self._fs, self._directory, header)
        except DiskFull:
            with suppress(
                StoreError
            ):  # perhaps not even its name was there; if it stays, the next try will say so
                self._fs.remove(segment_path(self._directory, header.first))
            raise

    def _extend(self, size: int) -> None:
        self._attempt(self._file.write_zeros, self._zeroed, size - self._zeroed, making_room=True)
        self._zeroed = size

    def _sync(self) -> None:
        self._attempt(self._file.fdatasync)
        self.synced = self.end

    def _check_fit(self) -> None:
        if not (self.accepting or self.read_only):
            raise self.refusal()

    def _attempt(self, step: Callable[..., T], *args: object, making_room: bool = False) -> T:
        """What `step` gives. Remembers a failure: lack of room until there is some,
        anything else for good.
        """
        try:
            return step(*args)
        except BaseException as error:
            self.accepting = False
            self.read_only = making_room and isinstance(error, DiskFull)
            if not self.read_only:
                self._why = f"failed: {error}"
            raise
