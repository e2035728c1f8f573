"""The log of another node, copied into a data directory that lacks what it needs.

    mark ──► segments, behind the other's newest snapshot ──► that snapshot ──► no mark

While the file `copying` is there, no broker opens the directory. Where the log ends is
found by reading it: so a copy that was interrupted, torn by a power cut or damaged goes
on behind its last whole record, at any node, because their files have the same bytes.
What a directory has of the log itself begins its copy.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from txmq.crashpoints import crashpoint
from txmq.errors import BackupMismatch, CorruptRecord, StoreError
from txmq.store.backup import CHUNK, SYNC_BYTES, segment_spans
from txmq.store.backup_manifest import segment_name, snapshot_name, write_durably
from txmq.store.index.environment import remove_environment
from txmq.store.log.cut import LONGEST_COPY, cut_log
from txmq.store.log.decoder import SegmentDecoder
from txmq.store.log.record import Record
from txmq.store.log.recovery import sync_names
from txmq.store.log.segment import (
    HEADER_SIZE,
    list_segments,
    log_directory,
    position_of_segment,
    read_log_id,
    segment_path,
)
from txmq.store.snapshot import (
    newest_snapshot,
    remove_snapshots,
    snapshot_directory,
    snapshot_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.store.backup import BackupSource, LogExtent, Watch
    from txmq.store.filesystem import File, FileSystem, ReadableFile
    from txmq.store.log.decoder import Damage

MARK: Final = "copying"
COMPARED: Final = 4 << 10  # bytes before the end of a copy that goes on


class CopyNeeded(StoreError):
    """A node cannot begin, or go on, with what its directory and the partition have.

    What its log has up to `keep` counts.
    """

    def __init__(self, message: str, keep: int = 0, *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "a node copies the log of the one that leads")
        self.keep = keep


class ForeignCopy(StoreError):
    """A directory has another log than the one to copy, or has gone on by itself."""


def is_unfinished(fs: FileSystem, directory: str) -> bool:
    """Return whether a copy into a data directory has begun and has not finished."""
    return MARK in fs.listdir(directory)


def copy_log(
    fs: FileSystem, source: BackupSource, directory: str, watch: Watch, keep: int = 0
) -> int:
    """Copy a log into a data directory, or go on with that; return its end.

    What the directory has of the log up to `keep` begins the copy. The caller has
    locked the directory. Raises ForeignCopy, CorruptRecord where the source is damaged,
    and the errors of the source.
    """
    extent = source.hold(0)
    _require_same_log(fs, directory, extent)
    end, begun = _whole_end(fs, directory), is_unfinished(fs, directory)
    end = end if begun else min(end, keep)
    _require_same_bytes(fs, source, directory, end, extent)
    if not begun:
        # What lies behind `keep` must be gone before anybody goes on with the copy.
        _cut(fs, directory, end)
        write_durably(fs, directory, MARK, b"")
    remove_environment(Path(directory) / "index")
    for folder in (log_directory(directory), snapshot_directory(directory)):
        fs.makedirs(folder)
    remove_snapshots(fs, directory)
    end = _copy(fs, source, directory, watch, end, extent)
    sync_names(fs, directory)
    crashpoint("copy.before_end")
    fs.remove(f"{directory}/{MARK}")
    fs.sync_directory(directory)
    return end


def mend(
    fs: FileSystem, source: BackupSource, directory: str, damages: Iterable[Damage], watch: Watch
) -> list[Damage]:
    """Write what the source has in place of damaged spans of a log, durably. Return
    those that are whole then.

    Raises ForeignCopy, and the errors of the source.
    """
    mended: list[Damage] = []
    for damage in damages:
        extent = source.hold(damage.position)
        _require_same_log(fs, directory, extent)
        is_there = extent.firsts[0] <= damage.position < damage.end <= extent.durable
        if is_there and _mend(fs, source, damage, watch):
            mended.append(damage)
    return mended


def _mend(fs: FileSystem, source: BackupSource, damage: Damage, watch: Watch) -> bool:
    path, start, end, _reason = damage
    first = position_of_segment(path)
    assert first is not None, "it is a segment's"
    with (
        closing(source.open(segment_name(first))) as theirs,
        closing(fs.open(path, write=True)) as ours,
    ):
        offsets = range(start - first, end - first, CHUNK)
        _transfer(source, theirs, ours, watch, first, offsets)
        return _end_of_records(ours, first, start, end) == end


def _require_same_log(fs: FileSystem, directory: str, extent: LogExtent) -> None:
    log_id = read_log_id(fs, directory)
    if log_id not in (None, extent.log_id):
        raise ForeignCopy(
            f"{directory} has log {log_id}, and the nodes have log {extent.log_id}",
            hint="give the node an empty data directory",
        )


def _whole_end(fs: FileSystem, directory: str) -> int:
    """Return where the log's whole records end; 0 = it has none. They are on disk."""
    end, segments = 0, list_segments(fs, directory)
    bounds = [*(segment.first for segment in segments), None][1:]
    for segment, bound in zip(segments, bounds, strict=True):
        if segment.header is None or (end and segment.first != end):
            break
        stop = segment.end if bound is None else bound
        with closing(fs.open(segment.path, write=True)) as file:
            end = _end_of_records(file, segment.first, segment.first, stop)
            file.fsync()
        if end != stop:
            break
    return end


def _end_of_records(file: File, first: int, start: int, stop: int) -> int:
    """Return where the whole records of a segment end that follow `start`."""
    end = start
    for item in SegmentDecoder(file, first).scan(start, stop):
        if not isinstance(item, Record):
            break
        end = item.end
    return end


def _cut(fs: FileSystem, directory: str, end: int) -> None:
    """Cut a log, but for the header that says which log it is."""
    for segment in list_segments(fs, directory)[:1]:
        cut_log(fs, directory, max(end, segment.first + HEADER_SIZE))


def _copy(
    fs: FileSystem, source: BackupSource, directory: str, watch: Watch, end: int, extent: LogExtent
) -> int:
    """Copy the log from `end` until it has the source's newest snapshot, and then the
    snapshot. Return where it ends then.
    """
    if end < extent.firsts[0]:  # nobody has what comes next
        end = extent.firsts[0]
        cut_log(fs, directory, 0)
    else:
        cut_log(fs, directory, end)
    watch.begin(extent.durable - end)
    while True:
        extent = source.hold(end)
        if extent.firsts[0] > end:
            raise BackupMismatch(f"the log begins at {extent.firsts[0]} by now", hint="try again")
        for first, bound in segment_spans(extent):
            if bound > end:
                _copy_segment(fs, source, directory, watch, first, max(first, end), bound)
                end = bound
        # It is chosen now: what it stands for is in the partition, however long the
        # log took.
        extent = source.hold(end)
        if not extent.snapshots:
            raise BackupMismatch("the log has no snapshot yet", hint="wait until it has one")
        if extent.snapshots[-1] <= end:
            _copy_snapshot(fs, source, directory, watch, extent)
            return end


def _require_same_bytes(
    fs: FileSystem, source: BackupSource, directory: str, end: int, extent: LogExtent
) -> None:
    """Raise ForeignCopy where the copy ends with other bytes than the source has."""
    if end > extent.durable:
        raise _has_gone_on(directory, end)
    for first, bound in segment_spans(extent):
        if not first < end <= bound:
            continue
        start = max(first, end - COMPARED)
        with (
            closing(fs.open(segment_path(directory, first))) as ours,
            closing(source.open(segment_name(first))) as theirs,
        ):
            if ours.pread(end - start, start - first) != theirs.pread(end - start, start - first):
                raise _has_gone_on(directory, end)


def _has_gone_on(directory: str, end: int) -> ForeignCopy:
    return ForeignCopy(
        f"{directory} has a log up to {end} that the node that leads does not have",
        hint=f"{LONGEST_COPY}; where this one is not needed, empty it",
    )


def _copy_segment(
    fs: FileSystem,
    source: BackupSource,
    directory: str,
    watch: Watch,
    first: int,
    start: int,
    bound: int,
) -> None:
    """Copy [start, bound) of a segment durably, and read its records.

    Raises CorruptRecord where these are damaged at the source.
    """
    path = segment_path(directory, first)
    opened = fs.create(path) if start == first else fs.open(path, write=True)
    with closing(source.open(segment_name(first))) as theirs, closing(opened) as ours:
        _transfer(source, theirs, ours, watch, first, range(start - first, bound - first, CHUNK))
        fs.sync_directory(log_directory(directory))
        crashpoint("copy.after_segment")
        if (whole := _end_of_records(ours, first, start, bound)) != bound:
            raise CorruptRecord(
                path, whole, "the node that leads has it so", hint="look at its alarms, and scrub"
            )


def _copy_snapshot(
    fs: FileSystem, source: BackupSource, directory: str, watch: Watch, extent: LogExtent
) -> None:
    remove_snapshots(fs, directory)
    position = extent.snapshots[-1]
    with (
        closing(source.open(snapshot_name(position))) as theirs,
        closing(fs.create(snapshot_path(directory, position))) as ours,
    ):
        _transfer(source, theirs, ours, watch, position, range(0, theirs.size(), CHUNK))
    fs.sync_directory(snapshot_directory(directory))
    found = newest_snapshot(fs, directory, extent.log_id)
    if found is None:
        raise CorruptRecord(snapshot_path(directory, position), 0, "the node that leads has it so")


def _transfer(
    source: BackupSource,
    theirs: ReadableFile,
    ours: File,
    watch: Watch,
    needed: int,
    offsets: range,
) -> None:
    """Copy the bytes at `offsets` durably; the log is needed from `needed` on."""
    unsynced = 0
    for offset in offsets:
        source.keep_holding(needed)
        size = min(CHUNK, offsets.stop - offset)
        data = theirs.pread(size, offset)
        if len(data) < size:
            raise BackupMismatch(f"{theirs.path}: ends at {offset + len(data)}", hint="try again")
        ours.pwrite([data], offset)
        unsynced += size
        if unsynced >= SYNC_BYTES:
            ours.fdatasync()
            unsynced = 0
        watch.passed(size)
    ours.fsync()
