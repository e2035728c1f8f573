"""The append-only log: the one place where what the broker must remember is kept.

    append ──► cut ──► write ──► done        on the log's own thread; only `write` blocks, and may run in another

`append` costs memory only; `cut` takes what has gathered since the last one; `write`
brings that to disk with one fdatasync; `done` moves `durable`, up to which replies may
go out and readers may read. Under an asynchronous flush policy writes skip the sync,
and `sync` with `settle` follows later. `reserve` writes zeros ahead of the records, for
whenever the disk has nothing better to do and `wants_room` says so: a sync that changes
no metadata is faster.

Positions are byte offsets over all segments; see `txmq.store.segment` and
`txmq.store.record` for the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Self
from uuid import UUID, uuid4

from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord, StoreError
from txmq.store.fs import Bytes, FileSystem, Lock
from txmq.store.reader import LogReader
from txmq.store.record import HEADER_SIZE as RECORD_HEADER_SIZE
from txmq.store.record import MAX_BODY, ZEROS, Record, encode_start, record_size, start_size
from txmq.store.recovery import Recovered, RecoveryReport, recover
from txmq.store.scan import Damage
from txmq.store.segment import HEADER_SIZE, SegmentHeader, SegmentInfo, log_directory, segment_path
from txmq.store.survey import Known
from txmq.store.writer import Flush, LogWriter, Run, Sizes, Tail

SEGMENT_SIZE = 1 << 30
PREALLOCATE = 16 << 20
NOTHING_KNOWN = Known()


class Appended(NamedTuple):
    """Where a record stands: from `position` to `end`; its attachment begins at
    `attachment_position`.
    """

    position: int
    end: int
    attachment_position: int


def lock_directory(fs: FileSystem, directory: str) -> Lock:
    """Make the data directory if need be, and take its lock. Raises DirectoryInUse."""
    fs.makedirs(log_directory(directory))
    return fs.lock(f"{directory}/lock")


class Log:
    """One log, open. Only one thread may use it, apart from `write`, `sync`, `reserve`,
    `try_space` and its `reader`.

    Once a write has failed, every further `append`, `write` and `sync` raises
    StoreClosed: state is ahead of the disk, and only a restart brings them together
    again.
    """

    def __init__(
        self, fs: FileSystem, directory: str, recovered: Recovered, sizes: Sizes, lock: Lock
    ) -> None:
        report, segments = recovered.report, recovered.segments
        tail = segments[-1]
        self.log_id = report.log_id
        self.quarantined = report.quarantined
        self._fs = fs
        self._directory = directory
        self._lock = lock
        self._sizes = sizes
        self._begun = [(s.first, s.header.created_at if s.header else 0) for s in segments]
        self.reader = LogReader(fs, directory, [segment.first for segment in segments])
        self._writer = LogWriter(
            fs, directory, self.log_id, sizes, Tail(tail.first, report.end, tail.size)
        )
        self.latencies = self._writer.latencies  # of writes, until they were on disk
        self._limit = tail.first + sizes.segment
        self._runs: list[Run] = []
        self._run: Run | None = None
        self._end = self._durable = report.end

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        directory: str,
        *,
        now: int,
        known: Known = NOTHING_KNOWN,
        lock: Lock | None = None,
        segment_size: int = SEGMENT_SIZE,
        preallocate: int = PREALLOCATE,
        new_log_id: Callable[[], UUID] = uuid4,
    ) -> tuple[Self, RecoveryReport]:
        """Open the log of a data directory, or make one, and say what recovery did.

        `known` is what tables and snapshots say of the log; `lock` the directory's,
        taken here if not given, and released by `close`. Raises DirectoryInUse, and
        what `recover` raises.
        """
        held = lock or lock_directory(fs, directory)
        try:
            recovered = recover(fs, directory, known, SegmentHeader(new_log_id(), 0, now))
            return cls(
                fs, directory, recovered, Sizes(segment_size, preallocate), held
            ), recovered.report
        except BaseException:
            if lock is None:
                held.release()
            raise

    @property
    def first(self) -> int:
        """The position that the oldest segment begins at."""
        return self._begun[0][0]

    @property
    def end(self) -> int:
        """The position after the last record appended; memory may be ahead of the
        disk.
        """
        return self._end

    @property
    def durable(self) -> int:
        """The position up to which the log is known to be on disk, as of the last
        `done` or `settle`.
        """
        return self._durable

    @property
    def read_only(self) -> bool:
        """Whether the disk is full: `append` raises DiskFull until `try_space` has
        found space.
        """
        return self._writer.read_only

    @property
    def busy(self) -> bool:
        """Whether a blocking call is under way in some thread: another one would wait
        for it.
        """
        return self._writer.busy

    @property
    def wants_room(self) -> bool:
        """Whether `reserve` should be called soon."""
        return self._writer.wants_room

    def append(
        self,
        kind: int,
        head: bytes,
        attachment: Bytes = b"",
        *,
        stored_at: int,
        boot_epoch: int,
        more: bool = False,
    ) -> Appended:
        """Add a record, in memory; an attachment given as bytes is not copied.

        `more`: it belongs to the record before, and is taken even where the disk was
        found full in between. Raises DiskFull while `read_only`, StoreClosed after a
        failure, StoreError for a record that is too large. Nothing of the record has
        been taken then.
        """
        if not self._writer.accepting and not (more and self._writer.read_only):
            raise self._writer.refusal()
        if type(attachment) is not bytes:
            attachment = bytes(attachment)  # what computes the checksum takes nothing else
        start = start_size(len(head))
        size = (start + len(attachment) + 7) & ~7
        run = self._run
        if run is None or self._end + size > self._limit:
            run = self._begin_run(size, stored_at)
        position = run.end
        buffers = run.buffers
        buffers.append(
            encode_start(kind, position, boot_epoch, self._durable, stored_at, head, attachment)
        )
        if attachment:
            buffers.append(attachment)
            buffers.append(ZEROS[-len(attachment) & 7])
        self._end = run.end = end = position + size
        return Appended(position, end, position + start)

    def cut(self) -> Flush | None:
        """What was appended since the last cut, None if nothing was. Flushes are to be
        written in the order of cuts.
        """
        if not self._runs:
            return None
        runs, self._runs, self._run = self._runs, [], None
        return Flush(runs, self._end)

    def write(self, flush: Flush, *, sync: bool = True) -> None:
        """Bring a flush to disk; see `LogWriter.write` for DiskFull, after which the
        same flush may be given again.
        """
        crashpoint("log.before_write")
        self._writer.write(flush, sync=sync)

    def done(self, flush: Flush) -> int:
        """Move `durable` to the end of a flush that was written, if it was synced;
        returns `durable`.
        """
        crashpoint("log.after_write")
        self._durable = max(self._durable, min(flush.end, self._writer.synced))
        return self._durable

    def sync(self) -> None:
        """Bring all that was written to disk; blocks."""
        self._writer.sync()

    def settle(self) -> int:
        """Move `durable` to all that was synced; returns `durable`."""
        self._durable = self._writer.synced
        return self._durable

    def reserve(self) -> None:
        """Write zeros ahead; blocks. Raises DiskFull, and the log is `read_only`, if
        there is no space for them.
        """
        self._writer.reserve()

    def try_space(self) -> bool:
        """Whether there is space again, for a log that is `read_only`; blocks."""
        return self._writer.try_space()

    def read(self, position: int, length: int) -> bytes:
        """Bytes that were written, unchecked, such as an attachment. Raises
        CorruptRecord if they are quarantined.
        """
        self._check_written(position, length)
        return self.reader.read(position, length)

    def read_cached(self, position: int, length: int) -> bytes | None:
        """As `read`, but None where that would have to wait for the disk: then call
        `read` in a thread.
        """
        self._check_written(position, length)
        return self.reader.read_cached(position, length)

    def record_at(self, position: int) -> Record:
        """The record at a position, its checksum verified. Raises CorruptRecord."""
        self._check_written(position, RECORD_HEADER_SIZE)
        return self.reader.record_at(position)

    def scan(self, start: int) -> Iterator[Record]:
        """The records from a position, where one begins, to what has been written by
        now; each checked.

        Passes over what is quarantined, and was reported so; raises CorruptRecord at
        other damage.
        """
        for item in self._walk(start, self._writer.end):
            if isinstance(item, Record):
                yield item
            elif not self._is_quarantined(item):
                raise CorruptRecord(item.path, item.position, item.reason)

    def quarantine(self, found: Iterable[Damage]) -> list[Damage]:
        """Read nothing of these spans any more, those of segments that are gone aside;
        returns what is new.
        """
        new = [
            damage
            for damage in found
            if damage.position >= self.first and not self._is_quarantined(damage)
        ]
        self.quarantined = (*self.quarantined, *new)
        return new

    def segments(self) -> list[SegmentInfo]:
        """The segments, first to last; the last one ends at `end`."""
        ends = [first for first, _ in self._begun[1:]] + [self._end]
        return [
            SegmentInfo(segment_path(self._directory, first), first, end, created_at)
            for (first, created_at), end in zip(self._begun, ends, strict=True)
        ]

    def release_before(self, position: int) -> list[SegmentInfo]:
        """Forget the segments that lie wholly below a position, and below `durable`;
        returns them, to be removed.

        Their files stay until `remove`: opened again before that, the log has them
        again.
        """
        below = min(
            position, self._durable, self._writer.first
        )  # the last segment may be in memory only
        released = [segment for segment in self.segments()[:-1] if segment.end <= below]
        for segment in released:
            del self._begun[0]
            self.reader.forget(segment.first)
        return released

    def remove(self, segment: SegmentInfo) -> None:
        """Remove a segment that was released; in any thread. To be called in their
        order: a crash must leave no gap.
        """
        folder = log_directory(self._directory)
        if segment.path.rpartition("/")[2] in self._fs.listdir(
            folder
        ):  # else a try before failed after that
            self._fs.remove(segment.path)
        self._fs.sync_directory(folder)

    def close(self) -> None:
        """Close the files and release the lock; what was not written is lost. Again is
        fine.
        """
        self._writer.close()
        self._lock.release()

    def _begin_run(self, size: int, stored_at: int) -> Run:
        if size > record_size(MAX_BODY) or size > self._sizes.segment - HEADER_SIZE:
            largest = min(record_size(MAX_BODY), self._sizes.segment - HEADER_SIZE)
            raise StoreError(
                f"a record of {size} bytes; the log takes {largest}",
                hint="send less at once, or raise the segment size",
            )
        if self._end + size > self._limit:
            self._begun.append((self._end, stored_at))
            self.reader.add(self._end)
            self._limit = self._end + self._sizes.segment
            self._end += HEADER_SIZE
        first, created_at = self._begun[-1]
        self._run = Run(first, created_at, self._end, self._end)
        self._runs.append(self._run)
        return self._run

    def _walk(self, start: int, end: int) -> Iterator[Record | Damage]:
        self._check_written(start, 0)
        firsts = [first for first, _ in self._begun]
        for first, bound in zip(firsts, [*firsts[1:], end], strict=True):
            if start < bound and first < end:
                yield from self.reader.scan(first).walk(start, min(bound, end))

    def _is_quarantined(self, damage: Damage) -> bool:
        return any(
            known.position <= damage.position and damage.end <= known.end
            for known in self.quarantined
        )

    def _check_written(self, position: int, length: int) -> None:
        if not self.first <= position <= position + length <= self._writer.end:
            raise StoreError(
                f"{self._directory}: positions {position} to {position + length} are not in the log, "
                f"which reaches from {self.first} to {self._writer.end}"
            )
        for damage in self.quarantined:
            if position < damage.end and damage.position < position + length:
                raise CorruptRecord(damage.path, damage.position, damage.reason)
