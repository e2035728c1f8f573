"""A data directory that is made from a backup.

    mark ──► snapshots ──► segments up to the point ──► the caller's record ──► no mark

While the file `restoring` is there, no broker opens the directory. A restore that was
interrupted anywhere is run again from its beginning.
"""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from txmq.crashpoints import crashpoint
from txmq.errors import BackupMismatch, RestoreUnfinished, StoreError
from txmq.model.message import EPOCH
from txmq.store.backup import CHUNK, damaged, require_manifest, verify_files
from txmq.store.backup_manifest import NAME, write_durably
from txmq.store.log.decoder import SegmentDecoder
from txmq.store.log.record import Record
from txmq.store.log.recovery import sync_names
from txmq.store.log.segment import HEADER_SIZE, log_directory
from txmq.store.log_copy import MARK as COPYING
from txmq.store.snapshot import RETAINED, snapshot_directory

if TYPE_CHECKING:
    from txmq.store.backup import Watch
    from txmq.store.backup_manifest import BackupFile, Manifest
    from txmq.store.filesystem import FileSystem

MARK: Final = "restoring"
_LAST: Final = 1 << 63
OWN_NAMES: Final = {"lock", "lock.new", MARK, f"{MARK}.tmp", "log", "snapshot", "index"}


class Until(NamedTuple):
    """The point to restore to: a position or a time of storage; None = no limit."""

    position: int | None = None
    time: int | None = None


class RestorePoint(NamedTuple):
    """The end of a record, and what the records up to there tell."""

    position: int
    stored_at: int
    boot_epoch: int


def require_served(fs: FileSystem, directory: str) -> None:
    """Refuse a directory that no broker may open. Raises RestoreUnfinished."""
    names = fs.listdir(directory)
    if MARK in names:
        raise RestoreUnfinished(f"{directory}: a restore into it has not finished")
    if COPYING in names:
        raise RestoreUnfinished(
            f"{directory}: a copy of another node's log has not finished",
            hint="start its node again: the copy goes on",
        )
    if NAME in names:
        raise RestoreUnfinished(f"{directory}: is a backup, which must stay as it is")


def require_empty(fs: FileSystem, directory: str) -> None:
    """Refuse a directory to restore into, unless it is empty or has an unfinished
    restore. Raises BackupMismatch.
    """
    names = set(fs.listdir(directory))
    foreign = names - OWN_NAMES
    if MARK not in names:
        # A restore that died before its mark has made these at most.
        foreign = names - {"lock", "lock.new", f"{MARK}.tmp"}
        if not fs.listdir(log_directory(directory)):
            foreign -= {"log"}
    if foreign:
        found = min(foreign)
        raise BackupMismatch(
            f"{directory}: holds {found!r}", hint="restore into an empty directory"
        )


def begin(fs: FileSystem, backup: str, directory: str) -> None:
    """Mark the directory, and remove what an interrupted restore has left. The caller
    has locked it.
    """
    write_durably(fs, directory, MARK, f"{backup}\n".encode())
    crashpoint("restore.after_mark")
    for folder in (log_directory(directory), snapshot_directory(directory)):
        fs.makedirs(folder)
        for name in fs.listdir(folder):
            fs.remove(f"{folder}/{name}")


def find_point(fs: FileSystem, backup: str, manifest: Manifest, until: Until) -> RestorePoint:
    """Return the end of the last record that is not behind `until`.

    Raises BackupMismatch where the backup cannot be restored to that point.
    """
    wanted = manifest.end if until.position is None else until.position
    if not manifest.first < wanted <= manifest.end:
        raise _out_of_range(manifest, f"position {wanted}")
    latest = _LAST if until.time is None else until.time
    found = (
        _last_point(fs, f"{backup}/{file.name}", first, min(wanted, first + file.size), latest)
        for first, file in reversed(manifest.segments)
        if first < wanted
    )
    point = next(filter(None, found), None)
    if point is None or point.position < manifest.points_from:
        asked = f"position {wanted}" if until.time is None else _utc(until.time)
        raise _out_of_range(manifest, asked)
    return point


def _out_of_range(manifest: Manifest, wanted: str) -> BackupMismatch:
    first = max(manifest.first, manifest.points_from)
    return BackupMismatch(
        f"the backup cannot be restored to {wanted}: it has points from position {first} to"
        f" {manifest.end}, the latter of {_utc(manifest.taken_at)}",
        hint="give a point within, or restore from an older backup",
    )


def _utc(micros: int) -> str:
    return f"{EPOCH + timedelta(microseconds=micros):%Y-%m-%dT%H:%M:%SZ}"


def _last_point(
    fs: FileSystem, path: str, first: int, end: int, latest: int
) -> RestorePoint | None:
    """Return the end of a segment's last record that was stored at the time `latest` or
    before, and ends at `end` or before; None = there is none.
    """
    point = None
    with closing(fs.open(path)) as file:
        for item in SegmentDecoder(file, first).scan(first + HEADER_SIZE, end):
            if isinstance(item, Record) and item.stored_at <= latest:
                point = RestorePoint(item.end, item.stored_at, item.boot_epoch)
    return point


def needed_files(manifest: Manifest, position: int) -> list[BackupFile]:
    """Return the files that make the log up to a position, with its newest snapshots.

    Raises BackupMismatch where it needs a snapshot that the backup lacks.
    """
    segments = [file for first, file in manifest.segments if first < position]
    snapshots = [file for at, file in manifest.snapshots if at <= position]
    if manifest.first and not snapshots:
        raise _out_of_range(manifest, f"position {position}, for which it has no snapshot")
    return [*snapshots[-RETAINED:], *segments]


def require_whole(fs: FileSystem, backup: str, manifest: Manifest, watch: Watch) -> None:
    """Refuse a backup with files that are missing or damaged. Raises BackupDamaged."""
    troubles = verify_files(fs, backup, manifest.files, watch)
    if troubles:
        path, _, reason = troubles[0].partition(": ")
        more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
        raise damaged(path, reason + more)


def copy_files(
    fs: FileSystem, backup: str, directory: str, manifest: Manifest, end: int, watch: Watch
) -> None:
    """Copy snapshots and segments durably, the log up to position `end`."""
    firsts = {file.name: first for first, file in manifest.segments}
    for file in needed_files(manifest, end):
        size = file.size
        if file.name in firsts:
            size = min(size, end - firsts[file.name])
        _copy(fs, f"{backup}/{file.name}", f"{directory}/{file.name}", size, watch)
        crashpoint("restore.after_file")
    fs.sync_directory(snapshot_directory(directory))
    sync_names(fs, directory)


def _copy(fs: FileSystem, source: str, target: str, size: int, watch: Watch) -> None:
    with closing(fs.open(source)) as file, closing(fs.create(target)) as copy:
        for offset in range(0, size, CHUNK):
            data = file.pread(min(CHUNK, size - offset), offset)
            copy.pwrite([data], offset)
            watch.passed(len(data))
        copy.fsync()


def end(fs: FileSystem, directory: str) -> None:
    """Remove the mark: the directory is a broker's from now on."""
    crashpoint("restore.before_end")
    fs.remove(f"{directory}/{MARK}")
    fs.sync_directory(directory)
    crashpoint("restore.after_end")


def open_backup(fs: FileSystem, backup: str) -> Manifest:
    """Return the manifest of a backup. Raises BackupDamaged, UnsupportedFormat."""
    manifest = require_manifest(fs, backup)
    if not manifest.segments:
        raise StoreError(f"{backup}: the backup has no log", hint="make another backup")
    return manifest
