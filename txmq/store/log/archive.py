"""The archive: copies of segments that the log no longer needs.

    <archive>/log/<first position, 20 digits>.seg

The layout is that of a data directory, so tools that read the log of a stopped broker
also read an archive. The archive may be on another disk: a segment is copied, made
durable under its name, and only then removed from the log.
"""

from __future__ import annotations

from contextlib import closing, suppress
from itertools import count
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from txmq.errors import StoreError
from txmq.store.log.decoder import CHUNK
from txmq.store.log.segment import log_directory, segment_path

if TYPE_CHECKING:
    from txmq.store.filesystem import FileSystem
    from txmq.store.log.segment import SegmentInfo

_TEMPORARY = ".tmp"
_LOST = ".lost-"  # of an incarnation of the log that was left by a restore


def archive_segment(fs: FileSystem, segment: SegmentInfo, archive: str) -> str:
    """Copy a sealed segment durably to the archive; return the copy's path.

    Blocks. An existing copy, left by a process that died before it removed the segment,
    stays as it is. Another segment of that name, of the part of the log that a restore
    has lost, is set aside. Raises DiskFull and StoreError; nothing of the segment is in
    the archive then.
    """
    folder, path = log_directory(archive), segment_path(archive, segment.first)
    fs.makedirs(folder)
    names = fs.listdir(folder)
    if path.rpartition("/")[2] in names:
        if _same(fs, segment, path):
            _sync_names(fs, archive)
            return path
        number = next(n for n in count(1) if f"{path}{_LOST}{n}".rpartition("/")[2] not in names)
        fs.rename(path, f"{path}{_LOST}{number}")
    temporary = path + _TEMPORARY
    if temporary.rpartition("/")[2] in names:
        fs.remove(temporary)
    try:
        _copy(fs, segment, temporary)
        fs.rename(temporary, path)
    except StoreError:
        with suppress(StoreError):  # the next attempt removes it
            fs.remove(temporary)
        raise
    _sync_names(fs, archive)
    return path


def _sync_names(fs: FileSystem, archive: str) -> None:
    """Make durable the names of the copies, and of folders made for the first."""
    for directory in (log_directory(archive), archive, str(PurePosixPath(archive).parent)):
        fs.sync_directory(directory)


def _same(fs: FileSystem, segment: SegmentInfo, path: str) -> bool:
    """Return whether a copy has the bytes of a segment."""
    size = segment.end - segment.first
    with closing(fs.open(segment.path)) as source, closing(fs.open(path)) as copy:
        return copy.size() == size and all(
            source.pread(CHUNK, offset) == copy.pread(CHUNK, offset)
            for offset in range(0, size, CHUNK)
        )


def _copy(fs: FileSystem, segment: SegmentInfo, path: str) -> None:
    size = segment.end - segment.first
    with closing(fs.open(segment.path)) as source, closing(fs.create(path)) as copy:
        for offset in range(0, size, CHUNK):
            copy.pwrite([source.pread(min(CHUNK, size - offset), offset)], offset)
        copy.fsync()
