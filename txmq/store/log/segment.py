"""Segments: the files of the log.

`log/<first position, 20 digits>.seg` begins with 64 bytes that count as positions of
the log:

    at   type  field
    0    8s    magic TXSEG, two zeros, 1
    8    u32   CRC32C over bytes 12 .. 64
    12   u32   version = 1
    16   16s   log id
    32   i64   first position: that of byte 0 of this file
    40   i64   created_at
    48         zeros

Records follow. In the last segment, zeros written ahead follow them. A segment is
sealed (cut to its size and fsynced) before the file of the next one is created. The
name of the next segment therefore proves that all segments before it are on disk.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple
from uuid import UUID

from google_crc32c import value

from txmq.errors import StoreError, UnsupportedFormat
from txmq.store.filesystem import File, FileSystem

MAGIC = b"TXSEG\0\0\1"
VERSION = 1
HEADER_SIZE = 64

_PREFIX = Struct("<8sI")
_COVERED = Struct("<I16sqq16x")
_DIGITS = 20
_SUFFIX = ".seg"


class SegmentHeader(NamedTuple):
    """The first 64 bytes of a segment."""

    log_id: UUID
    first: int
    created_at: int


class Segment(NamedTuple):
    """A segment file; `header` is None where it is cut off or damaged."""

    path: str
    first: int
    size: int
    header: SegmentHeader | None

    @property
    def end(self) -> int:
        """The position at the end of the file."""
        return self.first + self.size


class SegmentInfo(NamedTuple):
    """A segment of an open log: positions `first` to `end`."""

    path: str
    first: int
    end: int
    created_at: int


def log_directory(directory: str) -> str:
    """Return the directory of the segments in a data directory."""
    return f"{directory}/log"


def segment_path(directory: str, first: int) -> str:
    """Return the path of the segment that begins at `first`."""
    return f"{log_directory(directory)}/{first:0{_DIGITS}}{_SUFFIX}"


def position_of_segment(path: str) -> int | None:
    """Return the first position of the segment at `path`; None = it is none."""
    return _first_of(path.rpartition("/")[2])


def encode_segment_header(header: SegmentHeader) -> bytes:
    covered = _COVERED.pack(VERSION, header.log_id.bytes, header.first, header.created_at)
    return _PREFIX.pack(MAGIC, value(covered)) + covered


def decode_segment_header(data: bytes, path: str) -> SegmentHeader | None:
    """Return the header, None where it is cut off or damaged.

    Raises UnsupportedFormat for that of a later version.
    """
    if len(data) < HEADER_SIZE or not data.startswith(MAGIC):
        return None
    version, log_id, first, created_at = _COVERED.unpack_from(data, _PREFIX.size)
    if version > VERSION:
        # Before the checksum, because another version may define it differently.
        raise UnsupportedFormat(path, version, VERSION)
    _, checksum = _PREFIX.unpack_from(data)
    if value(data[_PREFIX.size : HEADER_SIZE]) != checksum:
        return None
    return SegmentHeader(UUID(bytes=log_id), first, created_at)


def create_segment(fs: FileSystem, directory: str, header: SegmentHeader) -> File:
    """Create a segment with its header only, durable together with its name.

    After an error the file may exist; remove it before another attempt.
    """
    file = fs.create(segment_path(directory, header.first))
    file.pwrite([encode_segment_header(header)], 0)
    file.fsync()
    fs.sync_directory(log_directory(directory))
    return file


def list_segments(fs: FileSystem, directory: str) -> list[Segment]:
    """Return the segments of a data directory, in order; ignore other files."""
    names = fs.listdir(log_directory(directory))
    return [
        _inspect(fs, directory, first) for name in names if (first := _first_of(name)) is not None
    ]


def existing_segments(fs: FileSystem, directory: str) -> list[Segment]:
    """Return as `list_segments` does; raises StoreError where there is no log."""
    segments = list_segments(fs, directory)
    if not segments:
        raise no_log(directory)
    return segments


def no_log(directory: str) -> StoreError:
    """Return the error for a directory without a log."""
    return StoreError(
        f"{directory}: there is no log", hint="give the data directory of a broker, or its archive"
    )


def read_log_id(fs: FileSystem, directory: str) -> UUID | None:
    """Return the id of the log in a data directory.

    None where there is no log yet, or none of its headers is readable.
    """
    headers = (segment.header for segment in list_segments(fs, directory))
    return next((header.log_id for header in headers if header is not None), None)


def _first_of(name: str) -> int | None:
    stem = name.removesuffix(_SUFFIX)
    if stem == name or len(stem) != _DIGITS or not (stem.isascii() and stem.isdigit()):
        return None
    return int(stem)


def _inspect(fs: FileSystem, directory: str, first: int) -> Segment:
    path = segment_path(directory, first)
    file = fs.open(path)
    try:
        return Segment(
            path, first, file.size(), decode_segment_header(file.pread(HEADER_SIZE, 0), path)
        )
    finally:
        file.close()
