"""The manifest of a backup, its last file: what the backup has, and how to check it.

    <backup>/backup.json
    <backup>/log/<first position, 20 digits>.seg
    <backup>/snapshot/<position, 20 digits>.snap

A directory without a whole manifest is no backup. Files may be longer than the manifest
says, where a later backup into the directory was interrupted; only what it says counts.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from google_crc32c import value

from txmq.errors import BackupDamaged, UnsupportedFormat
from txmq.store.filesystem import FileSystem
from txmq.store.log.segment import position_of_segment, segment_path
from txmq.store.snapshot import position_of_snapshot, snapshot_path

if TYPE_CHECKING:
    from collections.abc import Iterable

NAME: Final = "backup.json"
FORMAT: Final = "txmq backup"
VERSION: Final = 1
MAX_BYTES: Final = 64 << 20  # a million files
MAKE_ANOTHER: Final = "make another backup, or restore from another one"


class BackupFile(NamedTuple):
    """A file of a backup: its name below the directory, and size and CRC32C of what
    belongs to the backup.
    """

    name: str
    size: int
    checksum: int


class Manifest(NamedTuple):
    """The content of a backup: the log from position `first` to `end`.

    It can be restored to points from `points_from` on: before that, retention may have
    removed messages. `taken_at` is the broker's time at the end.
    """

    log_id: UUID
    incarnation: UUID | None
    first: int
    end: int
    points_from: int
    taken_at: int
    made_by: str  # version of txmq
    files: tuple[BackupFile, ...]

    @property
    def segments(self) -> list[tuple[int, BackupFile]]:
        """The segments in order, with their first positions."""
        return _sorted((position_of_segment(file.name), file) for file in self.files)

    @property
    def snapshots(self) -> list[tuple[int, BackupFile]]:
        """The snapshots in order, with their positions."""
        return _sorted((position_of_snapshot(file.name), file) for file in self.files)


def _sorted(
    files: Iterable[tuple[int | None, BackupFile]],
) -> list[tuple[int, BackupFile]]:
    return sorted((position, file) for position, file in files if position is not None)


def segment_name(first: int) -> str:
    """Return the name of a segment in a backup."""
    return segment_path("", first)[1:]


def snapshot_name(position: int) -> str:
    """Return the name of a snapshot in a backup."""
    return snapshot_path("", position)[1:]


def read_manifest(fs: FileSystem, directory: str) -> Manifest | None:
    """Return the manifest of a backup, None without one.

    Raises UnsupportedFormat for that of a later version, BackupDamaged.
    """
    if NAME not in fs.listdir(directory):
        return None
    path = f"{directory}/{NAME}"
    with closing(fs.open(path)) as file:
        data = file.pread(MAX_BYTES, 0)
    try:
        whole: Any = json.loads(data)
        if whole["format"] != FORMAT:
            raise BackupDamaged(f"{path}: not the manifest of a backup", hint=MAKE_ANOTHER)
        if whole["version"] > VERSION:
            raise UnsupportedFormat(path, whole["version"], VERSION)
        if whole["checksum"] != value(_canonical(whole["backup"])):
            raise BackupDamaged(f"{path}: checksum mismatch", hint=MAKE_ANOTHER)
        return _checked(path, _parse(whole["backup"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BackupDamaged(f"{path}: not readable: {error}", hint=MAKE_ANOTHER) from error


def write_manifest(fs: FileSystem, directory: str, manifest: Manifest) -> None:
    """Write a manifest durably, in the place of an earlier one."""
    made = manifest._asdict() | {
        "log_id": str(manifest.log_id),
        "incarnation": None if manifest.incarnation is None else str(manifest.incarnation),
        "files": [file._asdict() for file in manifest.files],
    }
    whole = {"format": FORMAT, "version": VERSION, "checksum": value(_canonical(made))}
    write_durably(fs, directory, NAME, json.dumps(whole | {"backup": made}, indent=1).encode())


def write_durably(fs: FileSystem, directory: str, name: str, content: bytes) -> None:
    """Write a small file of a directory, whole or not at all."""
    path = f"{directory}/{name}"
    if f"{name}.tmp" in fs.listdir(directory):
        fs.remove(f"{path}.tmp")
    with closing(fs.create(f"{path}.tmp")) as file:
        file.pwrite([content], 0)
        file.fsync()
    fs.rename(f"{path}.tmp", path)
    fs.sync_directory(directory)


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _parse(backup: dict[str, Any]) -> Manifest:
    incarnation = backup["incarnation"]
    numbers = {name: int(backup[name]) for name in ("first", "end", "points_from", "taken_at")}
    return Manifest(
        log_id=UUID(backup["log_id"]),
        incarnation=None if incarnation is None else UUID(incarnation),
        made_by=str(backup["made_by"]),
        files=tuple(
            BackupFile(str(file["name"]), int(file["size"]), int(file["checksum"]))
            for file in backup["files"]
        ),
        **numbers,
    )


def _checked(path: str, manifest: Manifest) -> Manifest:
    """Return the manifest, if its segments follow one another without a gap."""
    position = manifest.first
    for first, file in manifest.segments:
        if first != position:
            raise BackupDamaged(
                f"{path}: the segment of position {position} is missing", hint=MAKE_ANOTHER
            )
        position += file.size
    names = {segment_name(first) for first, _file in manifest.segments}
    names |= {snapshot_name(position) for position, _file in manifest.snapshots}
    if position != manifest.end or names != {file.name for file in manifest.files}:
        raise BackupDamaged(f"{path}: its files do not make the log it names", hint=MAKE_ANOTHER)
    return manifest
