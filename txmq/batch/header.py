"""Header of a batch (docs/FORMATS.md 3).

at   type  field
0    4s    magic TXB1
4    u32   CRC32C over everything from byte 8 on
8    u8    version = 1
9    u8    codec
10   u16   columns: flags of the optional ones
12   u32   count of rows
16   u32   length of the batch
20   u32   size of the bodies, uncompressed
24   i64   born_at
32   u64   tag filter
40   16s   producer id
56   u32   producer epoch
60   u32   0
64   u64   sequence of the first row
72         columns
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from google_crc32c import extend, value

from txmq.errors import RemoteProtocolError
from txmq.model import limits

MAGIC = b"TXB1"
VERSION = 1
LENGTH = 72
PRODUCER_AT = 40
SEQUENCE_AT = 64
SEQUENCE = Struct("<Q")

# Flags of the optional columns. No enum: its members are slow to combine.
OPTIONAL = KEY, TAG, HEADERS, DELIVER_AT, EXPIRE_AT = 1, 2, 4, 8, 16

PREFIX = Struct("<4sI")
COLUMNS_AT = 10
ONES = 0xFFFFFFFF
# CRC32C's table: the change of the register by the byte that is shifted out
TABLE = tuple(extend(ONES, bytes((byte,))) ^ ONES for byte in range(256))
# its inverse: that byte, by the highest byte of the result
STEPS = {entry >> 24: byte for byte, entry in enumerate(TABLE)}
WORTH_UNWINDING = 1 << 15  # bytes; copying more costs more than the eight steps back
FIELDS = Struct("<BBHIIIqQ16sIIQ")  # after the prefix; the checksum covers from here on


class Codec(IntEnum):
    """Compression of the joined bodies."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2


class BatchHeader(NamedTuple):
    """The header of a batch. In a bundle, the token stands in for the producer id."""

    checksum: int
    codec: int
    columns: int
    count: int  # type: ignore[assignment] # hides tuple.count, which a header does not need
    length: int
    size: int  # of the bodies, uncompressed
    born_at: int  # no message of the batch is younger
    tag_filter: int
    producer_id: bytes
    epoch: int
    sequence: int  # of row 0; row r has sequence + r


def has_expiry(buffer: bytes) -> bool:
    """Return whether a verified batch has times of expiry.

    Called for each batch that is delivered, hence one byte is enough.
    """
    return bool(buffer[COLUMNS_AT] & EXPIRE_AT)


def read_header(buffer: bytes) -> BatchHeader:
    """Return the header of the batch that `buffer` begins with.

    Raises RemoteProtocolError where it cannot be the header of a batch of this version.
    """
    if len(buffer) < LENGTH:
        raise RemoteProtocolError(f"a batch of {len(buffer)} bytes is shorter than its header")
    magic, checksum = PREFIX.unpack_from(buffer)
    version, codec, columns, count, length, size, born_at, tags, producer, epoch, zero, sequence = (
        FIELDS.unpack_from(buffer, PREFIX.size)
    )
    if magic != MAGIC or version != VERSION:
        hint = "client and broker must speak a common version"
        raise RemoteProtocolError(
            f"not a batch of version {VERSION}: {magic!r}, version {version}", hint=hint
        )
    header = BatchHeader(
        checksum, codec, columns, count, length, size, born_at, tags, producer, epoch, sequence
    )
    if zero or columns >= 2 * EXPIRE_AT or codec > Codec.LZ4:
        raise RemoteProtocolError(
            f"unknown features in a batch: codec {codec}, columns {columns}, reserved {zero}"
        )
    if not 0 < count <= limits.BATCH_ROWS or sequence + count - 1 > limits.SEQUENCE:
        raise RemoteProtocolError(f"invalid batch of {count} messages from sequence {sequence}")
    if not 0 <= born_at <= limits.TIME:
        raise RemoteProtocolError(
            f"invalid time {born_at}: a batch has born_at from 0 to {limits.TIME}"
        )
    if length % 8 or not LENGTH < length <= min(limits.BATCH, len(buffer)) or size > limits.BATCH:
        raise RemoteProtocolError(
            f"invalid batch of {length} bytes, {size} uncompressed, in a buffer of {len(buffer)}"
        )
    return header


def compute_checksum(buffer: bytes) -> int:
    """Return the checksum that a batch should have: over everything after the prefix.

    A large batch is not copied for that. The checksum starts from a register value that
    the prefix turns into CRC32C's initial one.
    """
    if len(buffer) < WORTH_UNWINDING:
        return int(value(buffer[PREFIX.size :]))
    register = ONES
    for byte in reversed(buffer[: PREFIX.size]):
        step = STEPS[register >> 24]
        register = (register ^ TABLE[step]) << 8 & ONES | step ^ byte
    return int(extend(register ^ ONES, buffer))


def with_producer(batch: bytes, producer_id: bytes, sequence: int | None = None) -> bytes:
    """Return the same batch with another producer id (or token), and its own or another
    sequence.
    """
    covered = bytearray(batch[PREFIX.size :])
    start = PRODUCER_AT - PREFIX.size
    covered[start : start + 16] = producer_id
    if sequence is not None:
        SEQUENCE.pack_into(covered, SEQUENCE_AT - PREFIX.size, sequence)
    return PREFIX.pack(MAGIC, value(bytes(covered))) + covered
