"""GROUP: the messages of one transaction, in parts (docs/FORMATS.md 2.1).

    u16 flags | u16 part | 16s token | u32 epoch | 32s digest | u32 head length | head | batches

The head is MessagePack: decider, service, actions, check_after, participants, and for
each batch topic, partition, epoch of the topic and length. Only part 0 has the first
five, they are null in the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

import msgpack

from txmq.errors import RemoteProtocolError
from txmq.model import limits
from txmq.model.message import is_name
from txmq.wire.decider import Decider, is_decider, is_participant
from txmq.wire.reader import Reader

SEALED, COMMIT_AT_ONCE = 1, 2
HEADER = struct.Struct("<HH16sI32s")
HEAD_LENGTH = struct.Struct("<I")
HEADER_AND_LENGTH = struct.Struct("<HH16sI32sI")
RECEIPT = struct.Struct("<Bq")
NO_DIGEST = bytes(32)
NO_DESCRIPTION = (None,) * 5
MOST_PARTICIPANTS = 1_024
KNOWN_BYTES = (
    512  # heads up to this length are remembered: those of small transactions come again and again
)
DECIDED_AT_ONCE = frozenset({"local", "foreign"})  # by whoever stores it: one-phase commit
ENTRY_LIMITS = (
    (1 << 32) - 1,
    (1 << 16) - 1,
    limits.BATCH,
)  # of partition, epoch of the topic and length

Entry = tuple[str, int, int, int]
Actions = tuple[tuple[object, ...], ...]
Participant = tuple[object, ...]


class PartBatch(NamedTuple):
    """A batch of a part: where it shall go, and its bytes."""

    topic: str
    partition: int
    topic_epoch: int
    batch: bytes


class Description(NamedTuple):
    """What part 0 says of the whole group. `check_after`: microseconds to the first
    check-back, 0 = none.
    """

    decider: Decider
    service: str = ""
    actions: Actions = ()
    check_after: int = 0
    participants: tuple[Participant, ...] = ()


class Part(NamedTuple):
    """A part of a group; the last one is `sealed` and carries the digest of all.

    `commit`: the group is decided with the seal, which only a local transaction may ask
    for, and a foreign manager's one-phase commit, in one part.
    """

    token: bytes
    part: int
    epoch: int
    sealed: bool
    commit: bool
    digest: bytes
    description: Description | None
    batches: tuple[PartBatch, ...]


class GroupReceipt(NamedTuple):
    """Where the group stands (txmq.model.bundle), and its place in the order of its
    keys: 0 while it has none.
    """

    state: int
    ticket: int


def pack_part(part: Part) -> list[bytes]:
    """The payload, in pieces; the batches are not copied."""
    flags = SEALED * part.sealed | COMMIT_AT_ONCE * part.commit
    return [HEADER.pack(flags, part.part, part.token, part.epoch, part.digest), *_body(part)]


def group_digest(parts: Iterable[Part]) -> bytes:
    """The digest of a group of these parts, whatever digest they carry: the same
    contents again have the same.
    """
    digest = sha256()
    for part in parts:
        for piece in _body(part):
            digest.update(piece)
    return digest.digest()


def unpack_part(payload: bytes) -> Part:
    """The part in a payload; its batches are yet to be verified. Raises
    RemoteProtocolError.
    """
    reader = Reader(payload)
    flags, part, token, epoch, digest, size = reader.fields(HEADER_AND_LENGTH)
    sealed, commit = bool(flags & SEALED), bool(flags & COMMIT_AT_ONCE)
    if (
        flags > SEALED | COMMIT_AT_ONCE
        or (commit and not sealed)
        or sealed == (digest == NO_DIGEST)
    ):
        raise RemoteProtocolError(f"part {part} of a group with flags {flags:#x}")
    description, entries = _unpack_head(reader.take(size), part)
    batches = tuple(
        [
            PartBatch(topic, partition, topic_epoch, reader.take(length))
            for topic, partition, topic_epoch, length in entries
        ]
    )
    reader.end()
    if commit and description is not None and description.decider[0] not in DECIDED_AT_ONCE:
        raise RemoteProtocolError(
            "only a local or one-phase transaction is decided as it is stored"
        )
    return Part(token, part, epoch, sealed, commit, digest, description, batches)


def pack_group_receipt(receipt: GroupReceipt) -> bytes:
    return RECEIPT.pack(receipt.state, receipt.ticket)


def unpack_group_receipt(payload: bytes) -> GroupReceipt:
    reader = Reader(payload)
    receipt = GroupReceipt(*reader.fields(RECEIPT))
    reader.end()
    return receipt


def _body(part: Part) -> list[bytes]:
    entries = tuple(
        [(topic, partition, epoch, len(batch)) for topic, partition, epoch, batch in part.batches]
    )
    described = part.description or NO_DESCRIPTION
    changes = (
        described[2] or described[4]
    )  # actions and participants: they differ each time, and may hold anything
    head = (
        _pack_head(described, entries)
        if changes or len(entries) > 1
        else _known_head(described, entries)
    )
    return [HEAD_LENGTH.pack(len(head)), head, *[batch.batch for batch in part.batches]]


def _pack_head(described: tuple[object, ...], entries: tuple[Entry, ...]) -> bytes:
    return bytes(msgpack.packb((*described, entries)))


_known_head = lru_cache(maxsize=256)(
    _pack_head
)  # those of small transactions are the same again and again


def _unpack_head(head: bytes, part: int) -> tuple[Description | None, tuple[Entry, ...]]:
    return _known_fields(head, part) if len(head) <= KNOWN_BYTES else _fields(head, part)


def _fields(head: bytes, part: int) -> tuple[Description | None, tuple[Entry, ...]]:
    try:
        fields = msgpack.unpackb(head, use_list=False, max_ext_len=0)
    except ValueError as error:
        raise RemoteProtocolError(f"a damaged head of a group: {error}") from error
    if (
        type(fields) is not tuple
        or len(fields) != len(NO_DESCRIPTION) + 1
        or type(fields[-1]) is not tuple
    ):
        raise RemoteProtocolError("a head of a group with other fields")
    *described, entries = fields
    if not all(map(_is_entry, entries)):
        raise RemoteProtocolError(
            "a group with an impossible entry: topic, partition, epoch and length are needed"
        )
    if part:
        if tuple(described) != NO_DESCRIPTION:
            raise RemoteProtocolError(f"part {part} of a group describes it once more")
        return None, entries
    return _description(*described), entries


_known_fields = lru_cache(maxsize=1024)(_fields)  # an error is not kept


def _description(
    decider: object, service: object, actions: object, check_after: object, participants: object
) -> Description:
    if not isinstance(decider, tuple) or not is_decider(decider):
        raise RemoteProtocolError(f"a group with an impossible decider: {decider!r:.200}")
    if not isinstance(service, str) or (service and not is_name(service)):
        raise RemoteProtocolError(f"a group of an impossible service: {service!r:.200}")
    if not isinstance(actions, tuple) or not all(
        isinstance(action, tuple) and action for action in actions
    ):
        raise RemoteProtocolError("a group with impossible actions: a list of lists is needed")
    if type(check_after) is not int or not 0 <= check_after <= limits.TIME:
        raise RemoteProtocolError(f"a group to be checked after {check_after!r:.200} microseconds")
    if not isinstance(participants, tuple) or not all(map(is_participant, participants)):
        raise RemoteProtocolError("a group with impossible participants")
    if len(participants) > MOST_PARTICIPANTS:
        raise RemoteProtocolError(
            f"a group with {len(participants)} participants, of {MOST_PARTICIPANTS} at most"
        )
    return Description(decider, service, actions, check_after, participants)


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, tuple) or len(entry) != len(ENTRY_LIMITS) + 1:
        return False
    topic, *numbers = entry
    in_range = all(
        type(n) is int and 0 <= n <= most for n, most in zip(numbers, ENTRY_LIMITS, strict=True)
    )
    return in_range and isinstance(topic, str) and is_name(topic)
