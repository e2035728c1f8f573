"""The header of a batch (docs/FORMATS.md 3).

0 magic | 4 crc32c of 8.. | 8 version | 9 codec | 10 columns | 12 count | 16 length | 20 size uncompressed | 24 born_at
32 tag filter | 40 producer id | 56 epoch | 60 zero | 64 sequence | 72 columns
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

# The columns that a batch may have or not; not an enum, whose members are slow to
# combine.
OPTIONAL = KEY, TAG, HEADERS, DELIVER_AT, EXPIRE_AT = 1, 2, 4, 8, 16

PREFIX = Struct("<4sI")
COLUMNS_AT = 10
ONES = 0xFFFFFFFF
TABLE = tuple(
    extend(ONES, bytes((byte,))) ^ ONES for byte in range(256)
)  # one step of CRC32C, by what is shifted out
STEPS = {
    entry >> 24: byte for byte, entry in enumerate(TABLE)
}  # which one it was, by the result's highest byte
WORTH_UNWINDING = 1 << 15  # bytes that take longer to copy than the few steps back
FIELDS = Struct("<BBHIIIqQ16sIIQ")  # after the prefix; what the checksum covers begins here


class Codec(IntEnum):
    """How the joined bodies are compressed."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2


class BatchHeader(NamedTuple):
    """What is known of a batch before its columns are read; in a group the token stands
    in for the producer id.
    """

    checksum: int
    codec: int
    columns: int
    count: int  # type: ignore[assignment] # hides a method of tuples that nobody calls on a header
    length: int
    size: int  # of the bodies, uncompressed
    born_at: int  # no message of the batch is younger
    tag_filter: int
    producer_id: bytes
    epoch: int
    sequence: int  # of row 0; row r has sequence + r


def expires(buffer: bytes) -> bool:
    """Whether a batch that was verified before has times of expiry. For each batch that
    is delivered, so quick.
    """
    return bool(buffer[COLUMNS_AT] & EXPIRE_AT)


def read_header(buffer: bytes) -> BatchHeader:
    """The header of the batch that `buffer` begins with. RemoteProtocolError where it
    cannot be one of this version.
    """
    if len(buffer) < LENGTH:
        raise RemoteProtocolError(f"a batch of {len(buffer)} bytes has no room for its header")
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
            f"batch with unknown features: codec {codec}, columns {columns}, reserved {zero}"
        )
    if not 0 < count <= limits.BATCH_ROWS or sequence + count - 1 > limits.SEQUENCE:
        raise RemoteProtocolError(f"batch of {count} messages from sequence {sequence}")
    if not 0 <= born_at <= limits.TIME:
        raise RemoteProtocolError(f"batch born at {born_at}")
    if length % 8 or not LENGTH < length <= min(limits.BATCH, len(buffer)) or size > limits.BATCH:
        raise RemoteProtocolError(
            f"batch of {length} bytes, {size} uncompressed, in a buffer of {len(buffer)}"
        )
    return header


def checksum(buffer: bytes) -> int:
    """The checksum that a batch should have: over all that follows it.

    A large one is not copied for that: the sum is begun with what its first bytes turn
    into the beginning of one.
    """
    if len(buffer) < WORTH_UNWINDING:
        return int(value(buffer[PREFIX.size :]))
    register = ONES
    for byte in reversed(buffer[: PREFIX.size]):
        step = STEPS[register >> 24]
        register = (register ^ TABLE[step]) << 8 & ONES | step ^ byte
    return int(extend(register ^ ONES, buffer))


def with_producer(batch: bytes, producer_id: bytes) -> bytes:
    """The same batch as one of another producer, or of another transaction, whose token
    stands for that.
    """
    covered = bytearray(batch[PREFIX.size :])
    start = PRODUCER_AT - PREFIX.size
    covered[start : start + 16] = producer_id
    return PREFIX.pack(MAGIC, value(bytes(covered))) + covered
