"""A record of the log: its bytes, and what can be wrong with them.

    at   type  field
    0    4s    magic TXR1
    4    u32   CRC32C over bytes 8 .. 48 + length
    8    u8    version = 1
    9    u8    kind: the event's number; 0 is a span that was lost (`txmq.store.repair`)
    10   u16   0
    12   u32   length of the body
    16   i64   position of this record
    24   u32   boot epoch
    28   u32   0
    32   i64   durable_before: durable end of the log when this record was appended
    40   i64   stored_at
    48         body, then zeros to a multiple of 8

The body is `u32 head length | head | zeros to a multiple of 8 | attachment`. The checksum covers the position, so that
an old record met where it was not written is not taken for one; `durable_before` is what lets recovery tell a torn
tail from damage. Nothing here touches a disk.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from typing import NamedTuple

from google_crc32c import extend, value

MAGIC = b"TXR1"
VERSION = 1
HEADER_SIZE = 48
VERSION_AT = 8  # where the version stands in a record
LOST = 0  # kind of the records that repair puts over a span that cannot be read any more

# Four times the largest frame: a damaged length field must not make a reader ask for
# gigabytes.
MAX_BODY = 64 << 20

ZEROS = [bytes(n) for n in range(8)]

_PREFIX = Struct("<4sI")
_FIELDS_AND_HEAD_LENGTH = Struct("<BB2xIqI4xqqI")
_HEADER = Struct("<4sIBB2xIqI4xqq")
_U32 = Struct("<I")
_NOTHING = bytes(HEADER_SIZE)


class Fault(Enum):
    """Why the bytes at a position are not a record. None of these alone tells a torn
    write from damage.
    """

    EMPTY = "zeros where a record should begin"
    MAGIC = "no record begins here"
    MISPLACED = "a record of another position"
    LENGTH = "impossible length"
    SHORT = "the record is cut off"
    CHECKSUM = "checksum mismatch"
    VERSION = "unknown record version"


class Record(NamedTuple):
    """One record, its checksum verified. `durable_before` is a position, `stored_at` in
    microseconds.
    """

    kind: int
    position: int
    boot_epoch: int
    durable_before: int
    stored_at: int
    body: memoryview

    @property
    def end(self) -> int:
        """The position just after the record."""
        return self.position + record_size(len(self.body))


class Body(NamedTuple):
    """The two parts of a record's body; `attachment_position` is where the second
    begins in the log.
    """

    head: memoryview
    attachment: memoryview
    attachment_position: int


def record_size(body_length: int) -> int:
    """How many bytes a record with a body of this length takes."""
    return (HEADER_SIZE + body_length + 7) & ~7


def start_size(head_length: int) -> int:
    """How many bytes of a record come before its attachment."""
    return (HEADER_SIZE + 4 + head_length + 7) & ~7


def encode_start(
    kind: int,
    position: int,
    boot_epoch: int,
    durable_before: int,
    stored_at: int,
    head: bytes,
    attachment: bytes = b"",
) -> bytes:
    """The record up to its attachment; the attachment and zeros to a multiple of 8
    follow it on disk.
    """
    size = 4 + len(head)
    padding = -size & 7
    length = size + padding + len(attachment)
    covered = (
        _FIELDS_AND_HEAD_LENGTH.pack(
            VERSION, kind, length, position, boot_epoch, durable_before, stored_at, len(head)
        )
        + head
        + ZEROS[padding]
    )
    checksum = extend(value(covered), attachment) if attachment else value(covered)
    return _PREFIX.pack(MAGIC, checksum) + covered


def decode(data: bytes, at: int, position: int) -> Record | Fault:
    """The record that begins at `data[at]`, which is `position` of the log.

    SHORT only says that `data` ends too soon: where there is more of the file, read
    more and ask again.
    """
    if at + HEADER_SIZE > len(data):
        return Fault.SHORT
    magic, checksum, version, kind, length, found_at, epoch, durable_before, stored_at = (
        _HEADER.unpack_from(data, at)
    )
    if magic != MAGIC:
        return Fault.EMPTY if data[at : at + HEADER_SIZE] == _NOTHING else Fault.MAGIC
    if found_at != position:
        return Fault.MISPLACED
    if length > MAX_BODY:
        return Fault.LENGTH
    if at + record_size(length) > len(data):
        return Fault.SHORT
    covered = data[at + 8 : at + HEADER_SIZE + length]
    if value(covered) != checksum:
        return Fault.CHECKSUM
    if version != VERSION:
        return Fault.VERSION
    return Record(
        kind, position, epoch, durable_before, stored_at, memoryview(covered)[HEADER_SIZE - 8 :]
    )


def wanted(data: bytes, at: int) -> int:
    """How many bytes the record at `data[at]` says it takes; of use where `decode` says
    SHORT.
    """
    if at + HEADER_SIZE > len(data):
        return HEADER_SIZE
    return record_size(_HEADER.unpack_from(data, at)[4])


def split_body(record: Record) -> Body:
    """Head and attachment of a record. Raises ValueError if the head is longer than the
    body.
    """
    body = record.body
    (length,) = _U32.unpack_from(body)
    start = start_size(length) - HEADER_SIZE
    if start > len(body):
        raise ValueError(
            f"record at {record.position}: head of {length} bytes in a body of {len(body)}"
        )
    return Body(body[4 : 4 + length], body[start:], record.position + HEADER_SIZE + start)
