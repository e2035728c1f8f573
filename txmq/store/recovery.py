"""What happens to a log when it is opened: its end is found, a torn tail cut, damage
quarantined or refused.

Damage that lies wholly below the newest snapshot is quarantined: named in the report,
and the rest served. Any other damage refuses start-up. Recovery ends with an fsync of
all that it found: what a crash left in the page cache is served only once it is on
disk. It may be interrupted anywhere and run again; run twice, it finds the same.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple
from uuid import UUID

from txmq.errors import CorruptRecord, StoreError
from txmq.store.fs import File, FileSystem
from txmq.store.scan import CHUNK, Damage, SegmentScan
from txmq.store.segment import (
    HEADER_SIZE,
    Segment,
    SegmentHeader,
    create_segment,
    list_segments,
    log_directory,
    segment_path,
)
from txmq.store.survey import Known, Surveyor

_REPAIR = (
    "restore the segments from a backup; or accept the loss: stop the broker and run `txmq log repair`, which keeps a "
    "copy and lists what is lost"
)


class TornTail(NamedTuple):
    """Unfinished records that were cut: `length` bytes from `position` on, kept in the
    file `copy`.
    """

    position: int
    length: int
    copy: str


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery found and did. Positions are the log's; `boot_epoch` and
    `stored_at` are the largest of the records read, 0 if none was. `unfinished` is a
    segment whose making a crash interrupted; it was taken away.
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
    """A log fit for use: its segments, the last of which takes new records at
    `report.end`.
    """

    segments: list[Segment]
    report: RecoveryReport


class Found(NamedTuple):
    """The segments of a log, and the file that was to become the next one when the
    process died.
    """

    log_id: UUID
    segments: list[Segment]
    unfinished: Segment | None

    @property
    def sealed_at(self) -> int | None:
        """Where the last segment ends, if it was sealed."""
        return self.unfinished.first if self.unfinished else None


def recover(fs: FileSystem, directory: str, known: Known, new: SegmentHeader) -> Recovered:
    """Make the log in a data directory fit to be served; make one, with the header
    `new`, where there is none.

    To be called with the directory's lock held. Raises CorruptRecord where durable data
    is damaged or missing, UnsupportedFormat for another version's files, StoreError for
    a mixture of logs; nothing has been changed then.
    """
    found = find_log(fs, directory, known)
    if found is None:
        return _create(fs, directory, new)
    quarantined: list[Damage] = []

    def judge(damage: Damage) -> None:
        if damage.end > known.snapshot:
            raise refusal(damage)
        quarantined.append(damage)

    survey = Surveyor(fs, known, judge).survey(found.segments, found.sealed_at)
    if survey.missing:
        raise refusal(survey.missing)
    torn = _make_durable(fs, found.segments[-1], survey.end)
    if found.unfinished:
        _take_away(fs, found.unfinished)
    sync_names(fs, directory)
    report = RecoveryReport(
        log_id=found.log_id,
        created=False,
        first=found.segments[0].first,
        scanned_from=survey.scanned_from,
        end=survey.end,
        records=survey.records,
        boot_epoch=survey.boot_epoch,
        stored_at=survey.stored_at,
        torn=torn,
        unfinished=found.unfinished.path if found.unfinished else None,
        quarantined=tuple(quarantined),
    )
    return Recovered(list_segments(fs, directory), report)


def find_log(fs: FileSystem, directory: str, known: Known) -> Found | None:
    """The log of a data directory, None if there never was one. Raises CorruptRecord if
    its beginning is missing.
    """
    segments = list_segments(fs, directory)
    unfinished = segments.pop() if segments and _is_unfinished(fs, segments[-1]) else None
    if not segments:
        began = max(*known, unfinished.first if unfinished else 0)
        if began:
            raise refusal(Damage(segment_path(directory, 0), 0, began, "the log is missing"))
        return None
    if segments[0].first > known.scan_from:
        reason = f"the log begins at {segments[0].first}, after the state that it should carry on"
        raise refusal(Damage(segments[0].path, known.scan_from, segments[0].first, reason))
    return Found(_common_id(segments), segments, unfinished)


def refusal(damage: Damage) -> CorruptRecord:
    """The error for damage that start-up cannot go past."""
    return CorruptRecord(damage.path, damage.position, damage.reason, hint=_REPAIR)


def sync_names(fs: FileSystem, directory: str) -> None:
    """Make the names of the segments, and of the directories above them, durable."""
    fs.sync_directory(log_directory(directory))
    fs.sync_directory(directory)
    fs.sync_directory(str(PurePosixPath(directory).parent))


def _create(fs: FileSystem, directory: str, new: SegmentHeader) -> Recovered:
    for unfinished in list_segments(fs, directory):
        _take_away(fs, unfinished)
    create_segment(fs, directory, new).close()
    sync_names(fs, directory)
    end = new.first + HEADER_SIZE
    report = RecoveryReport(
        log_id=new.log_id, created=True, first=new.first, scanned_from=end, end=end
    )
    return Recovered(list_segments(fs, directory), report)


def _is_unfinished(fs: FileSystem, segment: Segment) -> bool:
    # The header is on disk before the first record is written: without it, a record
    # means damage.
    if segment.header:
        return False
    with closing(fs.open(segment.path)) as file:
        return (
            SegmentScan(file, segment.first).next_record(segment.first, segment.end) == segment.end
        )


def _common_id(segments: list[Segment]) -> UUID:
    for segment in segments:
        if segment.header and segment.header.first != segment.first:
            reason = f"the file is the segment of {segment.header.first}, under a wrong name"
            raise refusal(Damage(segment.path, segment.first, segment.end, reason))
    ids = {segment.header.log_id for segment in segments if segment.header}
    if len(ids) != 1:
        raise StoreError(
            f"{segments[0].path}: the segments in this directory name {len(ids)} logs that they belong to",
            hint="move segments of another log out of the directory, or restore the segments from a backup",
        )
    return ids.pop()


def _make_durable(fs: FileSystem, segment: Segment, end: int) -> TornTail | None:
    """Cut what is torn after `end`, keeping a copy, and fsync what stays."""
    with closing(fs.open(segment.path, write=True)) as file:
        if SegmentScan(file, segment.first).blank(end, segment.end):
            file.fsync()
            return None
        torn = _keep_copy(fs, file, segment, end)
        file.truncate(end - segment.first)
        file.fsync()
        return torn


def _keep_copy(fs: FileSystem, file: File, segment: Segment, start: int) -> TornTail:
    path = f"{segment.path}.torn-{start}"
    if path.rpartition("/")[2] in fs.listdir(path.rpartition("/")[0]):
        fs.remove(path)  # of a recovery that was interrupted here
    length = 0
    with closing(fs.create(path)) as copy:
        for position in range(start, segment.end, CHUNK):
            data = file.pread(CHUNK, position - segment.first)
            copy.pwrite([data], position - start)
            length = position - start + len(data.rstrip(b"\0")) if data.strip(b"\0") else length
        copy.truncate(length)
        copy.fsync()
    return TornTail(start, length, path)


def _take_away(fs: FileSystem, unfinished: Segment) -> None:
    with closing(fs.open(unfinished.path)) as file:
        blank = SegmentScan(file, unfinished.first).blank(unfinished.first, unfinished.end)
    if blank:
        fs.remove(unfinished.path)
    else:
        fs.rename(unfinished.path, f"{unfinished.path}.torn-{unfinished.first}")
