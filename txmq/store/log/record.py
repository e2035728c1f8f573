"""Records of the log: encoding, decoding, and the possible faults.

    at   type  field
    0    4s    magic TXR1
    4    u32   CRC32C over bytes 8 .. 48 + length
    8    u8    version = 1
    9    u8    kind: the event's number; 0 is a lost span (`repair`)
    10   u16   0
    12   u32   length of the body
    16   i64   position of this record
    24   u32   boot epoch
    28   u32   0
    32   i64   durable_before: durable end of the log at the append of this record
    40   i64   stored_at
    48         body, then zeros to a multiple of 8

The body is `u32 head length | head | zeros to a multiple of 8 | attachment`. The
checksum covers the position, so that an old record at another position is not accepted.
`durable_before` is what lets recovery distinguish a torn tail from damage.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from typing import NamedTuple

from google_crc32c import extend, value

MAGIC = b"TXR1"
VERSION = 1
HEADER_SIZE = 48
VERSION_AT = 8
LOST = 0  # kind of the records with which repair overwrites unreadable spans

# Four times the largest frame: a damaged length must not make a reader allocate
# gigabytes.
MAX_BODY = 64 << 20

ZEROS = [bytes(n) for n in range(8)]

_PREFIX = Struct("<4sI")
_FIELDS_AND_HEAD_LENGTH = Struct("<BB2xIqI4xqqI")
_HEADER = Struct("<4sIBB2xIqI4xqq")
_U32 = Struct("<I")
_NOTHING = bytes(HEADER_SIZE)


class RecordFault(Enum):
    """Reason why the bytes at a position are no record.

    None of them alone distinguishes a torn write from damage.
    """

    EMPTY = "zeros where a record should begin"
    MAGIC = "no record begins here"
    MISPLACED = "a record of another position"
    LENGTH = "impossible length"
    SHORT = "the record is cut off"
    CHECKSUM = "checksum mismatch"
    VERSION = "unknown record version"


class Record(NamedTuple):
    """A record with verified checksum. `durable_before` is a position."""

    kind: int
    position: int
    boot_epoch: int
    durable_before: int
    stored_at: int
    body: memoryview

    @property
    def end(self) -> int:
        """The position after the record."""
        return self.position + record_size(len(self.body))


class Body(NamedTuple):
    """The two parts of a record's body, and the position of the second."""

    head: memoryview
    attachment: memoryview
    attachment_position: int


def record_size(body_length: int) -> int:
    """Return the size of a record with a body of this length."""
    return (HEADER_SIZE + body_length + 7) & ~7


def start_size(head_length: int) -> int:
    """Return the size of a record before its attachment."""
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
    """Return the record up to its attachment.

    On disk the attachment follows, then zeros to a multiple of 8.
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


def decode(data: bytes, at: int, position: int) -> Record | RecordFault:  # noqa: PLR0911  # one per fault
    """Return the record at `data[at]`, which is `position` of the log, or its fault.

    SHORT means only that `data` ends too early: where the file has more, read more and
    decode again.
    """
    if at + HEADER_SIZE > len(data):
        return RecordFault.SHORT
    magic, checksum, version, kind, length, found_at, epoch, durable_before, stored_at = (
        _HEADER.unpack_from(data, at)
    )
    if magic != MAGIC:
        return RecordFault.EMPTY if data[at : at + HEADER_SIZE] == _NOTHING else RecordFault.MAGIC
    if found_at != position:
        return RecordFault.MISPLACED
    if length > MAX_BODY:
        return RecordFault.LENGTH
    if at + record_size(length) > len(data):
        return RecordFault.SHORT
    covered = data[at + 8 : at + HEADER_SIZE + length]
    if value(covered) != checksum:
        return RecordFault.CHECKSUM
    if version != VERSION:
        return RecordFault.VERSION
    return Record(
        kind, position, epoch, durable_before, stored_at, memoryview(covered)[HEADER_SIZE - 8 :]
    )


def needed_size(data: bytes, at: int) -> int:
    """Return the size of the record at `data[at]` by its header, after SHORT."""
    if at + HEADER_SIZE > len(data):
        return HEADER_SIZE
    return record_size(_HEADER.unpack_from(data, at)[4])


def split_body(record: Record) -> Body:
    """Return head and attachment of a record.

    Raises ValueError if the head is longer than the body.
    """
    body = record.body
    (length,) = _U32.unpack_from(body)
    start = start_size(length) - HEADER_SIZE
    if start > len(body):
        raise ValueError(
            f"the record at {record.position} has a head of {length} bytes in a body of {len(body)}"
        )
    return Body(body[4 : 4 + length], body[start:], record.position + HEADER_SIZE + start)
