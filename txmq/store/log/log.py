"""The append-only log: all that the broker must remember.

    append ──► cut ──► write ──► complete     (`write` may run in another thread)

`append` costs memory only. `cut` takes the records since the last cut. `write` brings
them to disk with one fdatasync, and blocks. `complete` moves `durable`: up to it
replies may go out and readers may read. Under an asynchronous flush policy writes skip
the sync, and `sync` with `settle` follows later.

Positions are byte offsets over all segments; `segment` and `record` define the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, Self
from uuid import UUID, uuid4

from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord, StoreError
from txmq.store.filesystem import Bytes, FileLock, FileSystem
from txmq.store.log.cut import forbid_cut
from txmq.store.log.decoder import Damage
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.reader import LogReader
from txmq.store.log.record import HEADER_SIZE as RECORD_HEADER_SIZE
from txmq.store.log.record import MAX_BODY, ZEROS, Record, encode_start, record_size
from txmq.store.log.recovery import Recovered, RecoveryReport, recover
from txmq.store.log.segment import (
    HEADER_SIZE,
    SegmentHeader,
    SegmentInfo,
    log_directory,
    segment_path,
)
from txmq.store.log.writer import Flush, LogWriter, SegmentWrite, Sizes, Tail

SEGMENT_SIZE = 1 << 30
PREALLOCATE = 16 << 20
_BEFORE_HEAD = RECORD_HEADER_SIZE + 4 + 7  # header, length of the head, to round up to 8
NO_POSITIONS = KnownPositions()


class Appended(NamedTuple):
    """Place of an appended record, and the start of its attachment."""

    position: int
    end: int
    attachment_position: int


def lock_directory(fs: FileSystem, directory: str) -> FileLock:
    """Create the data directory if necessary, and lock it. Raises DirectoryInUse."""
    fs.makedirs(log_directory(directory))
    return fs.lock(f"{directory}/lock")


class Log:
    """An open log.

    One thread may use it, apart from `write`, `sync`, `try_space` and `reader`, which
    any thread may. After a failed write every `append`, `write` and `sync` raises
    StoreClosed: the state is ahead of the disk then, and only a restart reconciles
    them.

    `end` is the position after the last appended record; memory may be ahead of the
    disk. `durable` is the position up to which the log is on disk, as the last
    `complete` found.
    """

    def __init__(
        self, fs: FileSystem, directory: str, recovered: Recovered, sizes: Sizes, lock: FileLock
    ) -> None:
        report, segments = recovered.report, recovered.segments
        tail = segments[-1]
        self.log_id = report.log_id
        self.quarantined = report.quarantined
        self._fs = fs
        self._directory = directory
        self._lock = lock
        self._sizes = sizes
        self.replicated = False  # durable by other nodes: writes here need no sync
        self._largest = min(record_size(MAX_BODY), sizes.segment - HEADER_SIZE)
        # of each segment: first position, time of creation
        self._segments = [(s.first, s.header.created_at if s.header else 0) for s in segments]
        self.reader = LogReader(fs, directory, [segment.first for segment in segments])
        self._writer = LogWriter(
            fs,
            directory,
            self.log_id,
            sizes,
            Tail(tail.first, report.end, tail.size),
            lock.require_held,
        )
        self.latencies = self._writer.latencies  # of writes, until they were on disk
        self._limit = tail.first + sizes.segment
        self._writes: list[SegmentWrite] = []
        self._write: SegmentWrite | None = None
        self.end = self.durable = report.end

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        directory: str,
        *,
        now: int,
        positions: KnownPositions = NO_POSITIONS,
        lock: FileLock | None = None,
        segment_size: int = SEGMENT_SIZE,
        preallocate: int = PREALLOCATE,
        new_log_id: Callable[[], UUID] = uuid4,
    ) -> tuple[Self, RecoveryReport]:
        """Open or create the log of a data directory; return it with a recovery report.

        `positions` is the evidence of tables and snapshots about the log. `lock` is the
        directory's lock, acquired here if not given; `close` releases it. Raises
        DirectoryInUse, and as `recover` does.
        """
        acquired = lock or lock_directory(fs, directory)
        try:
            recovered = recover(fs, directory, positions, SegmentHeader(new_log_id(), 0, now))
            return cls(
                fs, directory, recovered, Sizes(segment_size, preallocate), acquired
            ), recovered.report
        except BaseException:
            if lock is None:
                acquired.release()
            raise

    @property
    def first(self) -> int:
        """First position of the oldest segment."""
        return self._segments[0][0]

    @property
    def read_only(self) -> bool:
        """True while the disk is full: `append` raises DiskFull until there is
        space.
        """
        return self._writer.read_only

    @property
    def busy(self) -> bool:
        """True while a blocking call runs in some thread; another one would wait."""
        return self._writer.busy

    def append(
        self,
        kind: int,
        head: bytes,
        attachment: Bytes = b"",
        *,
        stored_at: int,
        boot_epoch: int,
        continued: bool = False,
    ) -> Appended:
        """Add a record in memory. An attachment of type bytes is not copied.

        `continued`: the record continues the one before, and is accepted even where the
        disk turned out to be full in between. Raises DiskFull while `read_only`,
        StoreClosed after a failure, StoreError for a record that is too large; nothing
        is appended then.
        """
        if not self._writer.accepting and not (continued and self._writer.read_only):
            raise self._writer.refusal()
        if type(attachment) is not bytes:
            attachment = bytes(attachment)  # google_crc32c accepts nothing else
        start = len(head) + _BEFORE_HEAD & ~7  # `record.start_size`, written out
        size = (start + len(attachment) + 7) & ~7
        target = self._write
        if target is None or self.end + size > self._limit:
            target = self._begin_write(size, stored_at)
        position = target.end
        buffers = target.buffers
        buffers.append(
            encode_start(kind, position, boot_epoch, self.durable, stored_at, head, attachment)
        )
        if attachment:
            buffers.append(attachment)
            buffers.append(ZEROS[-len(attachment) & 7])
        self.end = target.end = end = position + size
        return Appended(position, end, position + start)

    def cut(self) -> Flush | None:
        """Return the records since the last cut, None without any.

        Flushes must be written in the order of their cuts.
        """
        if not self._writes:
            return None
        writes, self._writes, self._write = self._writes, [], None
        return Flush(writes, self.end)

    def copy(self, writes: Iterable[SegmentWrite]) -> None:
        """Add bytes of another node's log, from `end` on: whole records, and segments
        as they begin there. `cut` takes them like own records.
        """
        for write in writes:
            if write.first != self._segments[-1][0]:
                self._begin_segment(write.first, write.created_at)
            self._writes.append(write)
            self.end = write.end

    def write(self, flush: Flush, *, sync: bool = True) -> None:
        """Bring a flush to disk.

        After DiskFull the same flush may be written again (see `LogWriter.write`).
        """
        crashpoint("log.before_write")
        self._writer.write(flush, sync=sync)

    def complete(self, flush: Flush) -> int:
        """Move `durable` to the end of a written flush if synced, or if it is
        `replicated`; return `durable`.
        """
        crashpoint("log.after_write")
        reached = self._writer.end if self.replicated else self._writer.synced
        self.durable = max(self.durable, min(flush.end, reached))
        return self.durable

    def sync(self) -> None:
        """Bring everything written to disk. Blocks."""
        self._writer.sync()

    def settle(self) -> int:
        """Move `durable` to the end of everything synced. Return `durable`."""
        self.durable = self._writer.synced
        return self.durable

    def limit_zeros(self, most: int) -> None:
        """Let writes add about `most` bytes of zeros for later records."""
        self._writer.limit_zeros(most)

    def try_space(self) -> bool:
        """Return whether a `read_only` log has space again, with a step of zeros ahead
        of the records. Blocks.
        """
        return self._writer.try_space()

    def read(self, position: int, length: int) -> bytes:
        """Return written bytes, unchecked, such as an attachment.

        Raises CorruptRecord where they are quarantined.
        """
        self._check_written(position, length)
        return self.reader.read(position, length)

    def read_cached(self, position: int, length: int) -> bytes | None:
        """Return as `read` does, but None where it would wait for the disk.

        The caller then calls `read` in a thread.
        """
        self._check_written(position, length)
        return self.reader.read_cached(position, length)

    def record_at(self, position: int) -> Record:
        """Return the record at a position, checksum verified. Raises CorruptRecord."""
        self._check_written(position, RECORD_HEADER_SIZE)
        return self.reader.record_at(position)

    def scan(self, start: int) -> Iterator[Record]:
        """Yield the written records from `start`, where one begins.

        Each record is checked. Quarantined spans, already reported, are skipped; other
        damage raises CorruptRecord.
        """
        for item in self._scan(start, self._writer.end):
            if isinstance(item, Record):
                yield item
            elif not self._is_quarantined(item):
                raise CorruptRecord(item.path, item.position, item.reason)

    def quarantine(self, damages: Iterable[Damage]) -> list[Damage]:
        """Stop reading these spans, and return the new ones among them.

        Spans of segments that are gone are ignored.
        """
        new = [
            damage
            for damage in damages
            if damage.position >= self.first and not self._is_quarantined(damage)
        ]
        self.quarantined = (*self.quarantined, *new)
        return new

    def trust(self, mended: Collection[Damage]) -> None:
        """Read spans again that were damaged, and have been written anew."""
        self.quarantined = tuple(one for one in self.quarantined if one not in mended)

    def segments(self) -> list[SegmentInfo]:
        """Return the segments, first to last; the last one ends at `end`."""
        ends = [first for first, _ in self._segments[1:]] + [self.end]
        return [
            SegmentInfo(segment_path(self._directory, first), first, end, created_at)
            for (first, created_at), end in zip(self._segments, ends, strict=True)
        ]

    def release_before(self, position: int) -> list[SegmentInfo]:
        """Forget and return the segments that lie below a position and below `durable`.

        Their files stay until `remove`. A log opened before that has the segments
        again.
        """
        # the last segment may be in memory only
        below = min(position, self.durable, self._writer.first)
        released = [segment for segment in self.segments()[:-1] if segment.end <= below]
        for segment in released:
            del self._segments[0]
            self.reader.forget(segment.first)
        return released

    def remove(self, segment: SegmentInfo) -> None:
        """Remove a released segment. Any thread may call it.

        Segments must be removed in order: a crash must not leave a gap.
        """
        folder = log_directory(self._directory)
        # The name may be gone: an earlier attempt may have failed after the removal.
        if segment.path.rpartition("/")[2] in self._fs.listdir(folder):
            self._fs.remove(segment.path)
        self._fs.sync_directory(folder)

    def forbid_cut(self, why: str) -> None:
        """Keep the log as it is over the next starts of a node of a cluster."""
        forbid_cut(self._fs, self._directory, why)

    def close(self) -> None:
        """Close the files and release the lock. Unwritten records are lost.
        Idempotent.
        """
        self._writer.close()
        self._lock.release()

    def _begin_write(self, size: int, stored_at: int) -> SegmentWrite:
        if size > self._largest:
            raise StoreError(
                f"a record of {size} bytes exceeds the log's limit of {self._largest}",
                hint="send less at once, or raise the segment size",
            )
        if self.end + size > self._limit:
            self._begin_segment(self.end, stored_at)
            self.end += HEADER_SIZE
        first, created_at = self._segments[-1]
        self._write = SegmentWrite(first, created_at, self.end, self.end)
        self._writes.append(self._write)
        return self._write

    def _begin_segment(self, first: int, created_at: int) -> None:
        self._segments.append((first, created_at))
        self.reader.add(first)
        self._limit = first + self._sizes.segment

    def _scan(self, start: int, end: int) -> Iterator[Record | Damage]:
        self._check_written(start, 0)
        firsts = [first for first, _ in self._segments]
        for first, bound in zip(firsts, [*firsts[1:], end], strict=True):
            if start < bound and first < end:
                yield from self.reader.decoder(first).scan(start, min(bound, end))

    def _is_quarantined(self, damage: Damage) -> bool:
        return any(
            span.position <= damage.position and damage.end <= span.end for span in self.quarantined
        )

    def _check_written(self, position: int, length: int) -> None:
        if not self.first <= position <= position + length <= self._writer.end:
            raise StoreError(
                f"{self._directory}: positions {position} to {position + length} are not in the"
                f" log, which has {self.first} to {self._writer.end}"
            )
        for damage in self.quarantined:
            if position < damage.end and damage.position < position + length:
                raise CorruptRecord(damage.path, damage.position, damage.reason)
