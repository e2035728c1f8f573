"""Records of the partition that holds a shared log.

    at   type  field
    0    4s    magic TXP1
    4    u32   CRC32C over bytes 8 .. end
    8    u8    version = 1
    9    u8    kind: 1 genesis, 2 claim, 3 slice, 4 status
    10   u8    slice: 1 = its data begins with the header of a new segment;
               status: 1 = it leaves
    11         zeros
    12   u32   epoch: the boot epoch of the log's records
    16   16s   log id
    32   16s   nonce of a claim and of the slices that its owner writes; status: of
               its claims
    48   i64   genesis and slice: start, a position of the log; status: the end of its
               log
    56   i64   slice: position after the last whole record; a claim cuts the log there;
               genesis: created_at of the log's first segment;
               status: milliseconds of delay
    64         claim: the node's name in UTF-8; slice: bytes of the log's files;
               status: lines of UTF-8: name, version, address

The data of all slices that count are the bytes of the log: its records, and at the
start of each segment its header. So every node has the same files.

Magic, checksum, version and kind stay where they are in every version. A node that
meets a version or a kind that it does not know has to stop: to skip a claim that others
count is to lead beside another leader.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple
from uuid import UUID

from google_crc32c import extend, value

from txmq.errors import UnsupportedFormat

MAGIC = b"TXP1"
VERSION = 1
HEADER_SIZE = 64
# Kafka takes 1,000,000 bytes by default, with what its own batch adds.
MOST_DATA = 900 << 10

_PREFIX = Struct("<4sI")
_FIELDS = Struct("<BBBxI16s16sqq")
_NO_NONCE = bytes(16)
_PARTITION = "a record of the partition"


class Genesis(NamedTuple):
    """The first record that counts: which log this is, and where it goes on.

    `epoch` is the boot epoch of what lies before `start`: 0 for a new log, which starts
    behind the header of its first segment. Every node makes that one from `created_at`,
    in microseconds since the epoch.
    """

    log_id: UUID
    epoch: int
    start: int
    created_at: int


class Claim(NamedTuple):
    """A node wants to lead. `nonce` are 16 random bytes, used once."""

    log_id: UUID
    epoch: int
    nonce: bytes
    node: str


class Slice(NamedTuple):
    """Bytes of the log from `start`, written by the owner of a claim.

    Up to `whole` the log's records are complete; a slice may end within one.
    """

    log_id: UUID
    epoch: int
    nonce: bytes
    start: int
    whole: int
    data: bytes
    begins_segment: bool = False

    @property
    def end(self) -> int:
        """The position after the data."""
        return self.start + len(self.data)


class NodeStatus(NamedTuple):
    """What a node says of itself. It counts for nothing: nodes know one another by it.

    The node has read the log up to `end`, with a delay of `lag_ms`: so long it took to
    read what it had said before. `epoch` is the newest that it knows of. A node that
    `leaves` ends.
    """

    log_id: UUID
    epoch: int
    nonce: bytes
    end: int
    lag_ms: int
    node: str
    version: str
    address: str
    leaves: bool = False


PartitionRecord = Genesis | Claim | Slice | NodeStatus


def encode(record: PartitionRecord) -> bytes:
    """Return the bytes of a record."""
    match record:
        case Genesis(log_id, epoch, start, created_at):
            fields = (1, 0, epoch, log_id.bytes, _NO_NONCE, start, created_at)
            data = b""
        case Claim(log_id, epoch, nonce, node):
            fields, data = (2, 0, epoch, log_id.bytes, nonce, 0, 0), node.encode()
        case Slice(log_id, epoch, nonce, start, whole, data, begins_segment):
            fields = (3, begins_segment, epoch, log_id.bytes, nonce, start, whole)
        case NodeStatus(log_id, epoch, nonce, end, lag_ms, node, version, address, leaves):
            fields = (4, leaves, epoch, log_id.bytes, nonce, end, lag_ms)
            data = f"{node}\n{version}\n{address}".encode()
    covered = _FIELDS.pack(VERSION, *fields)
    return _PREFIX.pack(MAGIC, extend(value(covered), data)) + covered + data


def decode(data: bytes) -> PartitionRecord | None:
    """Return the record, None for bytes that are none.

    Nobody but a node of the cluster writes to the partition on purpose. What others
    wrote there is void like everything else that does not count. Raises
    UnsupportedFormat for a record of a later version.
    """
    if len(data) < HEADER_SIZE or not data.startswith(MAGIC):
        return None
    if value(data[_PREFIX.size :]) != checksum_of(data):
        return None
    version, kind, flag, epoch, log_id, nonce, start, whole = _FIELDS.unpack_from(
        data, _PREFIX.size
    )
    if version != VERSION:
        raise UnsupportedFormat(_PARTITION, version, VERSION)
    rest = data[HEADER_SIZE:]
    match kind:
        case 1:
            return Genesis(UUID(bytes=log_id), epoch, start, whole)
        case 2:
            return Claim(UUID(bytes=log_id), epoch, nonce, rest.decode(errors="replace"))
        case 3:
            return Slice(UUID(bytes=log_id), epoch, nonce, start, whole, rest, bool(flag))
        case 4:
            said = _said(rest)
            return said and NodeStatus(
                UUID(bytes=log_id), epoch, nonce, start, whole, *said, bool(flag)
            )
    raise UnsupportedFormat(_PARTITION, f"{version}, kind {kind}", VERSION)


def _said(lines: bytes) -> tuple[str, str, str] | None:
    """Return what the lines of a status say, None for other bytes. Later versions may
    have more lines.
    """
    try:
        node, version, address, *_later = lines.decode().split("\n")
    except ValueError:
        return None
    return node, version, address


def checksum_of(data: bytes) -> int:
    """Return the checksum that a record's bytes state; 0 for what is too short."""
    return int(_PREFIX.unpack_from(data)[1]) if len(data) >= _PREFIX.size else 0
