"""Segments: the files that the log is cut into.

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

Records follow, then, while it is the last one, zeros written ahead. A segment is sealed
(cut to its size and fsynced) before the file of the next one is made: that the next
one's name is there proves that all before it was on disk.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple
from uuid import UUID

from google_crc32c import value

from txmq.errors import StoreError, UnsupportedFormat
from txmq.store.fs import File, FileSystem

MAGIC = b"TXSEG\0\0\1"
VERSION = 1
HEADER_SIZE = 64

_PREFIX = Struct("<8sI")
_COVERED = Struct("<I16sqq16x")
_DIGITS = 20
_SUFFIX = ".seg"


class SegmentHeader(NamedTuple):
    """What the first 64 bytes of a segment say."""

    log_id: UUID
    first: int
    created_at: int


class Segment(NamedTuple):
    """A segment file as found in the directory. `header` is None where it is cut off or
    damaged.
    """

    path: str
    first: int
    size: int
    header: SegmentHeader | None

    @property
    def end(self) -> int:
        """The position that the end of the file stands for."""
        return self.first + self.size


class SegmentInfo(NamedTuple):
    """A segment of an open log: positions `first` to `end`, made at `created_at`."""

    path: str
    first: int
    end: int
    created_at: int


def log_directory(directory: str) -> str:
    """Where the segments of the data directory `directory` are."""
    return f"{directory}/log"


def segment_path(directory: str, first: int) -> str:
    """The file of the segment that begins at `first`."""
    return f"{log_directory(directory)}/{first:0{_DIGITS}}{_SUFFIX}"


def encode_segment_header(header: SegmentHeader) -> bytes:
    covered = _COVERED.pack(VERSION, header.log_id.bytes, header.first, header.created_at)
    return _PREFIX.pack(MAGIC, value(covered)) + covered


def decode_segment_header(data: bytes, path: str) -> SegmentHeader | None:
    """The header, None if it is cut off or damaged. Raises UnsupportedFormat for a
    later version's.
    """
    if len(data) < HEADER_SIZE or not data.startswith(MAGIC):
        return None
    version, log_id, first, created_at = _COVERED.unpack_from(data, _PREFIX.size)
    if version > VERSION:
        # Before the checksum: what that covers is for the other version to say.
        raise UnsupportedFormat(path, version, VERSION)
    _, checksum = _PREFIX.unpack_from(data)
    if value(data[_PREFIX.size : HEADER_SIZE]) != checksum:
        return None
    return SegmentHeader(UUID(bytes=log_id), first, created_at)


def create_segment(fs: FileSystem, directory: str, header: SegmentHeader) -> File:
    """Make a segment of nothing but its header, durable with its name.

    On an error the file may be there, and is then to be removed before another try.
    """
    file = fs.create(segment_path(directory, header.first))
    file.pwrite([encode_segment_header(header)], 0)
    file.fsync()
    fs.sync_directory(log_directory(directory))
    return file


def list_segments(fs: FileSystem, directory: str) -> list[Segment]:
    """The segments of a data directory, first to last. Other files are no business of
    the log's.
    """
    names = fs.listdir(log_directory(directory))
    return [
        _inspect(fs, directory, first) for name in names if (first := _first_of(name)) is not None
    ]


def existing_segments(fs: FileSystem, directory: str) -> list[Segment]:
    """As `list_segments`, for whoever must not begin a log where there is none. Raises
    StoreError.
    """
    segments = list_segments(fs, directory)
    if not segments:
        raise no_log(directory)
    return segments


def no_log(directory: str) -> StoreError:
    """The error for a directory without a log."""
    return StoreError(
        f"{directory}: there is no log", hint="name the data directory of a broker, or its archive"
    )


def read_log_id(fs: FileSystem, directory: str) -> UUID | None:
    """The id of the log in a data directory, None if there is no log yet or no header
    of it can be read.
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
