"""Recovery of a log at opening: find its end, cut a torn tail, judge damage.

Damage that lies wholly below the newest snapshot is quarantined: the report names it,
and the rest is served. Any other damage refuses the start. Recovery ends with an fsync
of everything it found, so that nothing is served from the page cache that a second
crash could lose. It may be interrupted anywhere and run again with the same result.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple
from uuid import UUID

from txmq.errors import CorruptRecord, StoreError
from txmq.store.filesystem import File, FileSystem
from txmq.store.log.decoder import CHUNK, Damage, SegmentDecoder
from txmq.store.log.integrity import IntegrityChecker, KnownPositions
from txmq.store.log.segment import (
    HEADER_SIZE,
    Segment,
    SegmentHeader,
    create_segment,
    list_segments,
    log_directory,
    segment_path,
)

_REPAIR = (
    "restore the segments from a backup; or accept the loss: stop the broker and run"
    " `txmq log repair`, which keeps a copy and lists what is lost"
)


class TornTail(NamedTuple):
    """Unfinished records that were cut: `length` bytes, kept in the file `copy`."""

    position: int
    length: int
    copy: str


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """Findings and actions of a recovery; positions are the log's.

    `boot_epoch` and `stored_at` are the largest of the records read, 0 without any.
    `unfinished` is a segment whose creation a crash interrupted; recovery removed it.
    """

    log_id: UUID
    created: bool
    first: int
    scanned_from: int
    end: int
    records: int = 0
    boot_epoch: int = 0
    stored_at: int = 0
    torn: TornTail | None = None
    unfinished: str | None = None
    quarantined: tuple[Damage, ...] = ()


class Recovered(NamedTuple):
    """A recovered log; its last segment takes new records at `report.end`."""

    segments: list[Segment]
    report: RecoveryReport


class FoundLog(NamedTuple):
    """The segments of a log, and the unfinished file of the next one."""

    log_id: UUID
    segments: list[Segment]
    unfinished: Segment | None

    @property
    def sealed_at(self) -> int | None:
        """The end of the last segment, if it was sealed."""
        return self.unfinished.first if self.unfinished else None


_COPY = (
    "if this directory is a copy that was made while its broker ran:"
    " `txmq log rebuild --data DIR --copy`; else " + _REPAIR
)


def recover(
    fs: FileSystem, directory: str, positions: KnownPositions, new: SegmentHeader
) -> Recovered:
    """Recover the log in a data directory, or create one with the header `new`.

    The caller holds the directory's lock. Raises CorruptRecord where durable data is
    damaged or missing, UnsupportedFormat for files of another version, StoreError for a
    mixture of logs; nothing is changed then.
    """
    log = find_log(fs, directory, positions)
    if log is None:
        return _create(fs, directory, new)
    quarantined: list[Damage] = []

    def on_damage(damage: Damage) -> None:
        if damage.end > positions.snapshot:
            raise damage_error(damage)
        quarantined.append(damage)

    integrity = IntegrityChecker(fs, positions, on_damage).check(log.segments, log.sealed_at)
    if integrity.missing:
        raise missing_end_error(integrity.missing)
    torn = _make_durable(fs, log.segments[-1], integrity.end)
    if log.unfinished:
        _remove_unfinished(fs, log.unfinished)
    sync_names(fs, directory)
    report = RecoveryReport(
        log_id=log.log_id,
        created=False,
        first=log.segments[0].first,
        scanned_from=integrity.scanned_from,
        end=integrity.end,
        records=integrity.records,
        boot_epoch=integrity.boot_epoch,
        stored_at=integrity.stored_at,
        torn=torn,
        unfinished=log.unfinished.path if log.unfinished else None,
        quarantined=tuple(quarantined),
    )
    return Recovered(list_segments(fs, directory), report)


def find_log(fs: FileSystem, directory: str, positions: KnownPositions) -> FoundLog | None:
    """Return the log of a data directory, None if there never was one.

    Raises CorruptRecord if its beginning is missing.
    """
    segments = list_segments(fs, directory)
    unfinished = segments.pop() if segments and _is_unfinished(fs, segments[-1]) else None
    if not segments:
        known_end = max(*positions, unfinished.first if unfinished else 0)
        if known_end:
            raise damage_error(
                Damage(segment_path(directory, 0), 0, known_end, "the log is missing")
            )
        return None
    if segments[0].first > positions.scan_from:
        reason = f"the log begins at {segments[0].first}, after the state that it continues"
        raise damage_error(Damage(segments[0].path, positions.scan_from, segments[0].first, reason))
    return FoundLog(_common_id(segments), segments, unfinished)


def damage_error(damage: Damage) -> CorruptRecord:
    """Return the error for damage that prevents the start."""
    return CorruptRecord(damage.path, damage.position, damage.reason, hint=_REPAIR)


def missing_end_error(damage: Damage) -> CorruptRecord:
    """Return the error for a log that ends before a position that it is known to have
    reached.
    """
    return CorruptRecord(damage.path, damage.position, damage.reason, hint=_COPY)


def sync_names(fs: FileSystem, directory: str) -> None:
    """Make the names of the segments, and of the directories above them, durable."""
    fs.sync_directory(log_directory(directory))
    fs.sync_directory(directory)
    fs.sync_directory(str(PurePosixPath(directory).parent))


def _create(fs: FileSystem, directory: str, new: SegmentHeader) -> Recovered:
    for unfinished in list_segments(fs, directory):
        _remove_unfinished(fs, unfinished)
    create_segment(fs, directory, new).close()
    sync_names(fs, directory)
    end = new.first + HEADER_SIZE
    report = RecoveryReport(
        log_id=new.log_id, created=True, first=new.first, scanned_from=end, end=end
    )
    return Recovered(list_segments(fs, directory), report)


def _is_unfinished(fs: FileSystem, segment: Segment) -> bool:
    # The header is on disk before the first record is written: a record without a
    # header means damage.
    if segment.header:
        return False
    with closing(fs.open(segment.path)) as file:
        return (
            SegmentDecoder(file, segment.first).next_record(segment.first, segment.end)
            == segment.end
        )


def _common_id(segments: list[Segment]) -> UUID:
    for segment in segments:
        if segment.header and segment.header.first != segment.first:
            reason = f"the file is the segment of {segment.header.first}, under a wrong name"
            raise damage_error(Damage(segment.path, segment.first, segment.end, reason))
    ids = {segment.header.log_id for segment in segments if segment.header}
    if len(ids) != 1:
        raise StoreError(
            f"{segments[0].path}: the segments in this directory belong to {len(ids)} logs",
            hint="move the segments of other logs away, or restore the segments from a backup",
        )
    return ids.pop()


def _make_durable(fs: FileSystem, segment: Segment, end: int) -> TornTail | None:
    """Cut the torn records after `end`, keeping a copy, and fsync the rest."""
    with closing(fs.open(segment.path, write=True)) as file:
        if SegmentDecoder(file, segment.first).is_zero(end, segment.end):
            file.fsync()
            return None
        torn = _copy_torn(fs, file, segment, end)
        file.truncate(end - segment.first)
        file.fsync()
        return torn


def _copy_torn(fs: FileSystem, file: File, segment: Segment, start: int) -> TornTail:
    path = f"{segment.path}.torn-{start}"
    if path.rpartition("/")[2] in fs.listdir(path.rpartition("/")[0]):
        fs.remove(path)  # an interrupted recovery left it
    length = 0
    with closing(fs.create(path)) as copy:
        for position in range(start, segment.end, CHUNK):
            data = file.pread(CHUNK, position - segment.first)
            copy.pwrite([data], position - start)
            length = position - start + len(data.rstrip(b"\0")) if data.strip(b"\0") else length
        copy.truncate(length)
        copy.fsync()
    return TornTail(start, length, path)


def _remove_unfinished(fs: FileSystem, unfinished: Segment) -> None:
    with closing(fs.open(unfinished.path)) as file:
        blank = SegmentDecoder(file, unfinished.first).is_zero(unfinished.first, unfinished.end)
    if blank:
        fs.remove(unfinished.path)
    else:
        fs.rename(unfinished.path, f"{unfinished.path}.torn-{unfinished.first}")
