"""Snapshots: the state tables as of one position of the log, one file each.

`snapshot/<position, 20 digits>.snap` begins with 64 bytes:

    at   type  field
    0    8s    magic TXSNAP, 0, 1
    8    u32   version = 1
    12   u32   CRC32C over bytes 16 .. 64
    16   16s   log id
    32   i64   position
    40         zeros

Blocks follow, each `u32 length | u32 CRC32C | MessagePack [table, [[key, value],
...]]`. The last block is `["", [number of rows]]`. The file is written under another
name, fsynced, then renamed. Two snapshots are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from struct import Struct
from typing import Any
from uuid import UUID

import msgpack
from google_crc32c import value as crc32c

from txmq.errors import CorruptRecord, StoreError, UnsupportedFormat
from txmq.store.filesystem import File, FileSystem

MAGIC = b"TXSNAP\0\1"
VERSION = 1
RETAINED = 2  # the older one serves if the newer is damaged

Row = tuple[str, bytes, bytes]  # table, key, value

_HEADER = Struct("<8sII16sq24x")
_COVERED = 16  # the header's checksum covers from here on
_BLOCK = Struct("<II")
_BLOCK_SIZE = 1 << 20
_DIGITS = 20
_SUFFIX, _TEMPORARY, _BAD, _AHEAD = ".snap", ".tmp", ".bad", ".ahead"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that was read and is whole: `rows` rows as of `position`."""

    path: str
    log_id: UUID
    position: int
    rows: int


def snapshot_directory(directory: str) -> str:
    """Return the directory of the snapshots in a data directory."""
    return f"{directory}/snapshot"


def snapshot_path(directory: str, position: int) -> str:
    """Return the path of the snapshot of a position."""
    return f"{snapshot_directory(directory)}/{position:0{_DIGITS}}{_SUFFIX}"


def snapshot_positions(fs: FileSystem, directory: str) -> list[int]:
    """Return the positions of the snapshots in a data directory, whole or not."""
    return _positions(fs, snapshot_directory(directory))


def position_of_snapshot(path: str) -> int | None:
    """Return the position of the snapshot at `path`; None = it is none."""
    stem = path.rpartition("/")[2].removesuffix(_SUFFIX)
    is_one = path.endswith(_SUFFIX) and len(stem) == _DIGITS and stem.isascii() and stem.isdigit()
    return int(stem) if is_one else None


def write_snapshot(
    fs: FileSystem, directory: str, log_id: UUID, position: int, rows: Iterable[Row]
) -> str:
    """Write a snapshot durably, remove all but the newest two, and return its path.

    Rows of one table should be adjacent. Blocks. After an error the directory is as
    before.
    """
    folder = f"{directory}/snapshot"
    path = f"{folder}/{position:0{_DIGITS}}{_SUFFIX}"
    fs.makedirs(folder)
    for name in fs.listdir(folder):
        if name.endswith(_TEMPORARY):
            fs.remove(f"{folder}/{name}")
    try:
        with closing(fs.create(path + _TEMPORARY)) as file:
            _write(file, _encode_header(log_id, position), rows)
            file.fsync()
        fs.rename(path + _TEMPORARY, path)
    except StoreError:
        with suppress(StoreError):  # the next snapshot removes it
            fs.remove(path + _TEMPORARY)
        raise
    fs.sync_directory(folder)
    fs.sync_directory(directory)
    for old in _positions(fs, folder)[:-RETAINED]:
        fs.remove(f"{folder}/{old:0{_DIGITS}}{_SUFFIX}")
    return path


def older_snapshot_position(fs: FileSystem, directory: str) -> int:
    """Return the position of the older of two snapshots, 0 without two.

    The log is needed from there on, in case the newer snapshot turns out to be damaged.
    """
    positions = _positions(fs, f"{directory}/snapshot")
    return positions[-RETAINED] if len(positions) >= RETAINED else 0


def newest_snapshot(fs: FileSystem, directory: str, log_id: UUID) -> Snapshot | None:
    """Return the newest whole snapshot of a data directory, None without one.

    A snapshot that is damaged, or of another log, is renamed to `.bad`. Raises
    UnsupportedFormat for one of another version.
    """
    folder = f"{directory}/snapshot"
    for position in reversed(_positions(fs, folder)):
        path = f"{folder}/{position:0{_DIGITS}}{_SUFFIX}"
        try:
            return _open_checked(fs, path, log_id, position)
        except CorruptRecord:
            fs.rename(path, path + _BAD)
            fs.sync_directory(folder)
    return None


def set_aside_snapshots(fs: FileSystem, directory: str, end: int) -> None:
    """Rename the snapshots of positions behind the log's `end` to `.ahead`."""
    folder = f"{directory}/snapshot"
    for position in _positions(fs, folder):
        if position > end:
            path = f"{folder}/{position:0{_DIGITS}}{_SUFFIX}"
            fs.rename(path, path + _AHEAD)
            fs.sync_directory(folder)


def remove_snapshots(fs: FileSystem, directory: str) -> None:
    """Remove all snapshots of a data directory."""
    folder = snapshot_directory(directory)
    for name in fs.listdir(folder):
        fs.remove(f"{folder}/{name}")


def read_rows(fs: FileSystem, snapshot: Snapshot) -> Iterator[Row]:
    """Yield all rows in the order of writing.

    Raises CorruptRecord if the file was damaged after it was checked.
    """
    with closing(fs.open(snapshot.path)) as file:
        for table, content in _blocks(file):
            if table:
                for key, value in content:
                    yield table, key, value


def _positions(fs: FileSystem, folder: str) -> list[int]:
    positions = map(position_of_snapshot, fs.listdir(folder))
    return [position for position in positions if position is not None]


def _encode_header(log_id: UUID, position: int) -> bytes:
    checksum = crc32c(_HEADER.pack(MAGIC, VERSION, 0, log_id.bytes, position)[_COVERED:])
    return _HEADER.pack(MAGIC, VERSION, checksum, log_id.bytes, position)


def _write(file: File, header: bytes, rows: Iterable[Row]) -> None:
    file.pwrite([header], 0)
    offset, count = len(header), 0
    for table, pairs in _grouped(rows):
        offset += _write_block(file, offset, [table, pairs])
        count += len(pairs)
    _write_block(file, offset, ["", [count]])


def _write_block(file: File, offset: int, content: list[object]) -> int:
    data: bytes = msgpack.packb(content)
    file.pwrite([_BLOCK.pack(len(data), crc32c(data)), data], offset)
    return _BLOCK.size + len(data)


def _grouped(rows: Iterable[Row]) -> Iterator[tuple[str, list[tuple[bytes, bytes]]]]:
    for table, group in groupby(rows, key=lambda row: row[0]):
        pairs, size = [], 0
        for _, key, value in group:
            pairs.append((key, value))
            size += len(key) + len(value)
            if size >= _BLOCK_SIZE:
                yield table, pairs
                pairs, size = [], 0
        if pairs:
            yield table, pairs


def _open_checked(fs: FileSystem, path: str, log_id: UUID, position: int) -> Snapshot:
    with closing(fs.open(path)) as file:
        header = file.pread(_HEADER.size, 0)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise CorruptRecord(path, 0, "not a snapshot")
        _, version, _, _, _ = _HEADER.unpack(header)
        if version > VERSION:
            raise UnsupportedFormat(path, version, VERSION)
        if header != _encode_header(log_id, position):
            raise CorruptRecord(
                path, 0, "a damaged header, or the snapshot of another log or position"
            )
        return Snapshot(path, log_id, position, _count(file))


def _count(file: File) -> int:
    rows = 0
    for table, content in _blocks(file):
        if table:
            rows += len(content)
        elif content != (rows,):
            raise CorruptRecord(
                file.path,
                file.size(),
                f"the snapshot has {rows} rows, its last block says otherwise",
            )
    return rows


def _blocks(file: File) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the blocks as table and rows, each checked.

    Of the last block the table is empty, and the only row is the number of rows.
    """
    offset, size, last = _HEADER.size, file.size(), False
    while not last:
        head = file.pread(_BLOCK.size, offset)
        length, checksum = _BLOCK.unpack(head) if len(head) == _BLOCK.size else (size, 0)
        # Zeros would be a valid empty block.
        if offset + _BLOCK.size + length > size or not length:
            raise CorruptRecord(file.path, offset, "the snapshot is cut off")
        data = file.pread(length, offset + _BLOCK.size)
        if crc32c(data) != checksum:
            raise CorruptRecord(file.path, offset, "checksum mismatch")
        table, content = msgpack.unpackb(data, use_list=False)
        yield table, content
        offset, last = offset + _BLOCK.size + length, not table
    if offset != size:
        raise CorruptRecord(file.path, offset, "data follows the end of the snapshot")
