"""Backups of a log: copies of its segments and of a snapshot, and a manifest.

    hold ──► snapshot ──► segments ──► manifest

The source keeps its segments while the backup runs, and says up to where the log is
durable: nothing behind that is copied. A second backup into a directory copies only
what is new: the rest is verified, and copied again only where it is damaged. The last
segment grows in place behind what the earlier manifest has, so that this manifest stays
true until the next one replaces it.

A file is copied under another name, synced and renamed. So a backup that was
interrupted anywhere leaves the earlier one whole, and the next one goes on.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from google_crc32c import extend

from txmq.crashpoints import crashpoint
from txmq.errors import BackupDamaged, BackupMismatch, StoreError
from txmq.store.backup_manifest import (
    MAKE_ANOTHER,
    NAME,
    BackupFile,
    Manifest,
    read_manifest,
    segment_name,
    snapshot_name,
    write_manifest,
)
from txmq.store.log.decoder import SegmentDecoder
from txmq.store.log.record import Record
from txmq.store.log.segment import HEADER_SIZE, log_directory
from txmq.store.snapshot import snapshot_directory
from txmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from txmq.store.filesystem import File, FileSystem, ReadableFile
    from txmq.store.log.decoder import Damage

CHUNK: Final = 256 << 10
SYNC_BYTES: Final = 1 << 20  # a sync of much more would delay those of a broker on the same disk
PARTIAL: Final = ".part"
LOCK: Final = "lock"
OWN_NAMES: Final = {LOCK, f"{LOCK}.new", NAME, f"{NAME}.tmp", "log", "snapshot"}


class LogExtent(NamedTuple):
    """A consistent point of a log: all of it from `first` to `durable` is on disk.

    `firsts` are the first positions of its segments, the last of which may go on behind
    `durable`. `snapshots` are the positions of its snapshots up to there.
    """

    log_id: UUID
    incarnation: UUID | None
    firsts: tuple[int, ...]
    durable: int
    snapshots: tuple[int, ...]
    at: int


class BackupSource(Protocol):
    """A log that keeps its segments for a backup."""

    def hold(self, position: int) -> LogExtent:
        """Keep the log from a position on, as far as it is still there, and return its
        extent.
        """

    def keep_holding(self, position: int) -> None:
        """Keep the log from `position` on for a while longer. Called often. Raises
        BackupMismatch where it has not been kept.
        """

    def open(self, name: str) -> ReadableFile:
        """Open a file of the data directory."""


class Watch(Protocol):
    """Observer of a backup or a restore, which may slow it down."""

    def begin(self, total: int) -> None:
        """Note the number of bytes to read."""

    def passed(self, read: int) -> None:
        """Note that so many more bytes were read."""


class BackupReport(NamedTuple):
    """A finished backup: bytes that were copied, and bytes that were there before.

    `mended` are files that were damaged in the backup, and were copied again.
    """

    manifest: Manifest
    copied: int
    kept: int
    mended: tuple[str, ...]


def back_up(fs: FileSystem, source: BackupSource, target: str, watch: Watch) -> BackupReport:
    """Bring the backup in directory `target` up to date, or make it there.

    Raises BackupMismatch where the directory has something else, or the backup of
    another log; BackupDamaged, DirectoryInUse, DiskFull, and the errors of the source.
    """
    foreign = set(fs.listdir(target)) - OWN_NAMES
    if foreign:
        raise BackupMismatch(f"{target}: holds {min(foreign)!r}, which is not of a backup")
    for folder in (log_directory(target), snapshot_directory(target)):
        fs.makedirs(folder)
    lock = fs.lock(f"{target}/{LOCK}")
    try:
        return _Backup(fs, source, target, watch).run()
    finally:
        lock.release()


class _Backup:
    """One backup. `_files` are those that are whole, in the order of copying."""

    def __init__(self, fs: FileSystem, source: BackupSource, target: str, watch: Watch) -> None:
        self._fs, self._source, self._target, self._watch = fs, source, target, watch
        self._before = read_manifest(fs, target)
        self._known = {file.name: file for file in self._before.files} if self._before else {}
        self._needed = 0  # the log is needed from there on
        self._copied = self._kept = 0
        self._mended: list[str] = []

    def run(self) -> BackupReport:
        before = self._before
        extent = self._source.hold(0)
        crashpoint("backup.after_hold")
        self._require_same_log(extent)
        spans = segment_spans(extent)
        first = self._needed = spans[0][0]
        if before is None:
            points_from = extent.durable if first else 0
        elif first > before.end:
            raise BackupMismatch(
                f"{self._target}: the backup ends at {before.end}, and the log begins at {first} "
                "by now",
                hint="make the next backup into another directory",
            )
        else:
            first, points_from = before.first, before.points_from
        snapshots = extent.snapshots[-1:]
        if first and not snapshots and not (before and before.snapshots):
            raise BackupMismatch(f"the log begins at {first}, and has no snapshot")
        held = {name for name in self._known if name not in {segment_name(s) for s, _ in spans}}
        self._watch.begin(
            sum(self._known[name].size for name in held) + sum(end - s for s, end in spans)
        )
        # First, because the source does not keep its snapshots.
        files = [self._snapshot(at) for at in snapshots if snapshot_name(at) not in self._known]
        crashpoint("backup.after_snapshot")
        files += [self._keep(self._known[name]) for name in sorted(held)]
        for start, end in spans:
            self._needed = start
            files.append(self._segment(segment_name(start), end - start))
            crashpoint("backup.after_segment")
        manifest = Manifest(
            log_id=extent.log_id,
            incarnation=extent.incarnation,
            first=first,
            end=extent.durable,
            points_from=points_from,
            taken_at=extent.at,
            made_by=__version__,
            files=tuple(sorted(files)),
        )
        for folder in (log_directory(self._target), snapshot_directory(self._target)):
            self._fs.sync_directory(folder)
        self._fs.sync_directory(self._target)
        crashpoint("backup.before_manifest")
        write_manifest(self._fs, self._target, manifest)
        self._fs.sync_directory(str(PurePosixPath(self._target).parent))
        crashpoint("backup.after_manifest")
        return BackupReport(manifest, self._copied, self._kept, tuple(self._mended))

    def _require_same_log(self, extent: LogExtent) -> None:
        before = self._before
        if before is None:
            return
        if (before.log_id, before.incarnation) != (extent.log_id, extent.incarnation):
            raise BackupMismatch(
                f"{self._target}: the backup is of log {before.log_id}, incarnation "
                f"{before.incarnation or 'original'}; this is log {extent.log_id}, incarnation "
                f"{extent.incarnation or 'original'}"
            )
        if before.end > extent.durable:
            raise BackupMismatch(
                f"{self._target}: the backup has the log up to {before.end}, and this one ends at "
                f"{extent.durable}: it is a copy, or an older state"
            )

    def _keep(self, known: BackupFile) -> BackupFile:
        """Verify a file that the log does not need any more."""
        self._source.keep_holding(self._needed)
        if self._checksum_of_copy(known.name, known.size) != known.checksum:
            raise damaged(f"{self._target}/{known.name}")
        self._kept += known.size
        return known

    def _snapshot(self, position: int) -> BackupFile:
        name = snapshot_name(position)
        with closing(self._source.open(name)) as file:
            return self._copy(name, file, file.size())

    def _segment(self, name: str, size: int) -> BackupFile:
        known = self._known.get(name)
        if known is None:
            return self._segment_without_manifest(name, size)
        if self._checksum_of_copy(name, known.size) != known.checksum:
            self._mended.append(name)
            with closing(self._source.open(name)) as file:
                return self._copy(name, file, size)
        self._kept += known.size
        if known.size == size:
            return known
        with closing(self._source.open(name)) as file:
            if self._checksum(file, known.size) != known.checksum:
                raise BackupMismatch(
                    f"{self._target}/{name}: the log has other records there: it is a copy, or an "
                    "older state that has gone on"
                )
            return self._extend(known, file, size)

    def _segment_without_manifest(self, name: str, size: int) -> BackupFile:
        """Copy a segment, unless an interrupted backup has done so."""
        with closing(self._source.open(name)) as file:
            checksum = self._checksum_of_copy(name, size)
            if checksum is not None and checksum == self._checksum(file, size):
                self._kept += size
                return BackupFile(name, size, checksum)
            return self._copy(name, file, size)

    def _extend(self, known: BackupFile, source: ReadableFile, size: int) -> BackupFile:
        """Add what is new behind what the earlier manifest has."""
        with closing(self._fs.open(f"{self._target}/{known.name}", write=True)) as copy:
            copy.truncate(known.size)  # an interrupted backup may have left more
            checksum = self._transfer(source, copy, known.size, size, known.checksum)
        return BackupFile(known.name, size, checksum)

    def _copy(self, name: str, source: ReadableFile, size: int) -> BackupFile:
        path = f"{self._target}/{name}"
        partial = path + PARTIAL
        folder, _, base = partial.rpartition("/")
        if base in self._fs.listdir(folder):
            self._fs.remove(partial)
        try:
            with closing(self._fs.create(partial)) as copy:
                checksum = self._transfer(source, copy, 0, size, 0)
            crashpoint("backup.before_rename")
            self._fs.rename(partial, path)
        except StoreError:
            with suppress(StoreError):  # the next backup removes it
                self._fs.remove(partial)
            raise
        self._fs.sync_directory(folder)
        return BackupFile(name, size, checksum)

    def _transfer(
        self, source: ReadableFile, copy: File, start: int, end: int, checksum: int
    ) -> int:
        """Copy [start, end) durably; return the checksum, continued from `checksum`."""
        unsynced = 0
        for offset in range(start, end, CHUNK):
            self._source.keep_holding(self._needed)
            data = source.pread(min(CHUNK, end - offset), offset)
            if len(data) < min(CHUNK, end - offset):
                raise BackupMismatch(
                    f"{source.path}: ends at {offset + len(data)}, before {end}",
                    hint="the log is damaged: txmq log verify",
                )
            copy.pwrite([data], offset)
            checksum = extend(checksum, data)
            unsynced += len(data)
            if unsynced >= SYNC_BYTES:
                copy.fdatasync()
                unsynced = 0
            self._watch.passed(len(data))
        copy.fsync()
        self._copied += end - start
        return checksum

    def _checksum_of_copy(self, name: str, size: int) -> int | None:
        """Return the checksum of the first bytes of a copy; None = there are fewer."""
        folder, _, base = f"{self._target}/{name}".rpartition("/")
        if base not in self._fs.listdir(folder):
            return None
        with closing(self._fs.open(f"{self._target}/{name}")) as file:
            return self._checksum(file, size) if file.size() >= size else None

    def _checksum(self, file: ReadableFile, size: int) -> int:
        checksum = 0
        for offset in range(0, size, CHUNK):
            self._source.keep_holding(self._needed)
            data = file.pread(min(CHUNK, size - offset), offset)
            checksum = extend(checksum, data)
            self._watch.passed(len(data))
        return checksum


def segment_spans(extent: LogExtent) -> list[tuple[int, int]]:
    """Return start and end of the segments, up to the durable end."""
    firsts = [first for first in extent.firsts if first < extent.durable]
    return list(zip(firsts, [*firsts[1:], extent.durable], strict=True))


def damaged(path: str, reason: str = "its bytes are not those that were copied") -> BackupDamaged:
    """Return the error for a file of a backup that cannot be used."""
    return BackupDamaged(f"{path}: {reason}", hint=MAKE_ANOTHER)


def require_manifest(fs: FileSystem, directory: str) -> Manifest:
    """Return the manifest of a backup. Raises BackupDamaged where there is none."""
    manifest = read_manifest(fs, directory)
    if manifest is None:
        hint = "name the directory of a backup; one that was interrupted: `txmq log backup` again"
        raise BackupDamaged(f"{directory}: there is no whole backup", hint=hint)
    return manifest


def verify_files(
    fs: FileSystem, directory: str, files: Sequence[BackupFile], watch: Watch
) -> list[str]:
    """Return what is wrong with files of a backup."""
    return [
        trouble
        for file in files
        if (trouble := _trouble(fs, f"{directory}/{file.name}", file, watch))
    ]


def _trouble(fs: FileSystem, path: str, known: BackupFile, watch: Watch) -> str:
    folder, _, base = path.rpartition("/")
    if base not in fs.listdir(folder):
        return f"{path}: is missing"
    checksum = 0
    with closing(fs.open(path)) as file:
        if file.size() < known.size:
            return f"{path}: has {file.size()} bytes of {known.size}"
        for offset in range(0, known.size, CHUNK):
            data = file.pread(min(CHUNK, known.size - offset), offset)
            checksum = extend(checksum, data)
            watch.passed(len(data))
    return "" if checksum == known.checksum else f"{path}: checksum mismatch"


def find_damage(fs: FileSystem, directory: str, manifest: Manifest) -> list[Damage]:
    """Return the spans of a backup's log that hold no records: they were damaged when
    the backup was made.
    """
    found: list[Damage] = []
    for first, file in manifest.segments:
        with closing(fs.open(f"{directory}/{file.name}")) as opened:
            scan = SegmentDecoder(opened, first).scan(first + HEADER_SIZE, first + file.size)
            found += [item for item in scan if not isinstance(item, Record)]
    return found
