"""GROUP: the bundle of one transaction, in parts (docs/FORMATS.md 2.1).

    u16 flags | u16 part | 16s token | u32 epoch | 32s digest
    | u32 head length | head | batches

The head is MessagePack: decider, service, actions, check_after, participants, and for
each batch topic, partition, epoch of the topic and length. Only part 0 has the first
five; in other parts they are null.
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
from txmq.model.bundle import BundleReceipt, BundleState
from txmq.model.decider import COMMITTED_WHEN_STORED, ByPostgres, Decider, Participant
from txmq.model.message import is_name
from txmq.wire.decider import parse_decider, parse_participant
from txmq.wire.payload_reader import unfit

SEALED, COMMIT_AT_ONCE = 1, 2
HEADER = struct.Struct("<HH16sI32s")
HEAD_LENGTH = struct.Struct("<I")
HEADER_AND_LENGTH = struct.Struct("<HH16sI32sI")
RECEIPT_LAYOUT = struct.Struct("<Bq")
STATES = {int(state): state for state in BundleState}
NO_DIGEST = bytes(32)
NO_DESCRIPTION = (None,) * 5
MAX_PARTICIPANTS = 1_024
CACHED_HEAD_BYTES = 512  # heads of small transactions repeat, so they are cached
WITH_POSITION = b"\x96\x96\xa8postgres"  # the begin of a head: a decider of six fields
MAX_PARTITION, MAX_EPOCH = (1 << 32) - 1, (1 << 16) - 1
ENTRY_LIMITS = (MAX_PARTITION, MAX_EPOCH, limits.BATCH)  # the last is the length of a batch

HeadEntry = tuple[str, int, int, int]
ActionRows = tuple[tuple[object, ...], ...]  # of `BundleAction`s; the core checks their form


class PartBatch(NamedTuple):
    """A batch of a part: its destination, and its bytes."""

    topic: str
    partition: int
    topic_epoch: int
    batch: bytes


class BundleDescription(NamedTuple):
    """The description of a bundle in its part 0.

    `check_after`: microseconds to the first check-back, 0 = none.
    """

    decider: Decider
    service: str = ""
    actions: ActionRows = ()
    check_after: int = 0
    participants: tuple[Participant, ...] = ()


class BundlePart(NamedTuple):
    """A part of a bundle. The last one is `sealed`, and carries the digest of all.

    `commit`: the bundle is decided with the seal. This is allowed for local
    transactions, and for one-phase commits of foreign managers in one part.
    """

    token: bytes
    part: int
    epoch: int
    sealed: bool
    commit: bool
    digest: bytes
    description: BundleDescription | None
    batches: tuple[PartBatch, ...]


def pack_part(part: BundlePart) -> list[bytes]:
    """Return the payload as buffers; the batches are not copied."""
    flags = SEALED * part.sealed | COMMIT_AT_ONCE * part.commit
    return [HEADER.pack(flags, part.part, part.token, part.epoch, part.digest), *_body(part)]


def bundle_digest(parts: Iterable[BundlePart]) -> bytes:
    """Return the digest of the contents of all parts, without their own digests."""
    digest = sha256()
    for part in parts:
        for buffer in _body(part):
            digest.update(buffer)
    return digest.digest()


def token_of_part(payload: bytes) -> bytes:
    """Return the token of a part, which is not checked. Raises RemoteProtocolError."""
    if len(payload) < HEADER.size:
        raise RemoteProtocolError(f"a payload of {len(payload)} bytes ends too early")
    token: bytes = HEADER.unpack_from(payload)[2]
    return token


def unpack_part(payload: bytes) -> BundlePart:
    """Return the part in a payload; its batches are not verified yet.

    Raises RemoteProtocolError.
    """
    try:
        flags, part, token, epoch, digest, size = HEADER_AND_LENGTH.unpack_from(payload)
    except struct.error as error:
        raise RemoteProtocolError(f"a payload of {len(payload)} bytes ends too early") from error
    sealed, commit = bool(flags & SEALED), bool(flags & COMMIT_AT_ONCE)
    if (
        flags > SEALED | COMMIT_AT_ONCE
        or (commit and not sealed)
        or sealed == (digest == NO_DIGEST)
    ):
        raise RemoteProtocolError(f"part {part} of a bundle has invalid flags {flags:#x}")
    end = HEADER_AND_LENGTH.size + size
    if end > len(payload):
        raise RemoteProtocolError(f"a payload of {len(payload)} bytes ends too early")
    description, entries = _unpack_head(payload[HEADER_AND_LENGTH.size : end], part)
    batches = []
    for topic, partition, topic_epoch, length in entries:
        start, end = end, end + length
        batches.append(PartBatch(topic, partition, topic_epoch, payload[start:end]))
    if end != len(payload):
        raise RemoteProtocolError(
            f"a payload of {len(payload)} bytes, where its entries need {end}"
        )
    if (
        commit
        and description is not None
        and not isinstance(description.decider, COMMITTED_WHEN_STORED)
    ):
        raise RemoteProtocolError(
            "only a local or one-phase transaction is decided as it is stored"
        )
    return BundlePart(token, part, epoch, sealed, commit, digest, description, tuple(batches))


def pack_bundle_receipt(receipt: BundleReceipt) -> bytes:
    return RECEIPT_LAYOUT.pack(receipt.state, receipt.ticket)


def unpack_bundle_receipt(payload: bytes) -> BundleReceipt:
    if len(payload) != RECEIPT_LAYOUT.size:
        raise unfit(payload, RECEIPT_LAYOUT.size)
    state, ticket = RECEIPT_LAYOUT.unpack(payload)
    return BundleReceipt(read_state(state), ticket)


def read_state(number: int) -> BundleState:
    """Return the state in a receipt. Raises RemoteProtocolError."""
    try:
        return STATES[number]
    except KeyError as error:
        raise RemoteProtocolError(f"unknown state {number} of a bundle") from error


def _body(part: BundlePart) -> list[bytes]:
    entries = tuple(
        [(topic, partition, epoch, len(batch)) for topic, partition, epoch, batch in part.batches]
    )
    described = part.description
    # Actions and participants differ each time, and may hold anything: not cached.
    if len(entries) > 1 or (
        described is not None and (described.actions or described.participants)
    ):
        head = _pack_head(described or NO_DESCRIPTION, entries)
    else:
        head = _cached_head(described or NO_DESCRIPTION, entries)
    return [HEAD_LENGTH.pack(len(head)), head, *[batch.batch for batch in part.batches]]


def _pack_head(described: tuple[object, ...], entries: tuple[HeadEntry, ...]) -> bytes:
    return bytes(msgpack.packb((*described, entries)))


_cached_head = lru_cache(maxsize=256)(_pack_head)


def _unpack_head(head: bytes, part: int) -> tuple[BundleDescription | None, tuple[HeadEntry, ...]]:
    if len(head) > CACHED_HEAD_BYTES:
        return _fields(head, part)
    if head.startswith(WITH_POSITION):
        return _fields_with_position(head, part)
    return _cached_fields(head, part)


def _fields_with_position(
    head: bytes, part: int
) -> tuple[BundleDescription | None, tuple[HeadEntry, ...]]:
    """Return the fields of a head that repeats but for its decider's position."""
    try:
        decider, *others = msgpack.unpackb(head, use_list=False, max_ext_len=0)
    except ValueError:
        return _fields(head, part)  # which says what is wrong
    kind, system_id, timeline, oid, xid, position = decider
    if type(position) is not int or position <= 0:
        return _fields(head, part)
    repeated = msgpack.packb(((kind, system_id, timeline, oid, xid, 1), *others))
    described, entries = _cached_fields(repeated, part)
    assert described is not None, "parts without a description have no decider"
    decider = ByPostgres(system_id, timeline, oid, xid, position)
    return BundleDescription(decider, *described[1:]), entries


def _fields(head: bytes, part: int) -> tuple[BundleDescription | None, tuple[HeadEntry, ...]]:
    try:
        fields = msgpack.unpackb(head, use_list=False, max_ext_len=0)
    except ValueError as error:
        raise RemoteProtocolError(f"the head of a bundle is damaged: {error}") from error
    if (
        type(fields) is not tuple
        or len(fields) != len(NO_DESCRIPTION) + 1
        or type(fields[-1]) is not tuple
    ):
        raise RemoteProtocolError("the head of a bundle has other fields")
    *described, entries = fields
    if not all(map(_is_entry, entries)):
        raise RemoteProtocolError(
            "the head of a bundle has an invalid entry:"
            " topic, partition, epoch and length are needed"
        )
    if part:
        if tuple(described) != NO_DESCRIPTION:
            raise RemoteProtocolError(f"part {part} of a bundle describes it again")
        return None, entries
    return _description(*described), entries


_cached_fields = lru_cache(maxsize=1024)(_fields)  # errors are not cached


def _description(
    decider: object, service: object, actions: object, check_after: object, participants: object
) -> BundleDescription:
    parsed = parse_decider(decider)
    if parsed is None:
        raise RemoteProtocolError(f"invalid decider {decider!r:.200} of a bundle")
    if not isinstance(service, str) or (service and not is_name(service)):
        raise RemoteProtocolError(f"invalid service {service!r:.200} of a bundle")
    if not isinstance(actions, tuple) or not all(
        isinstance(action, tuple) and action for action in actions
    ):
        raise RemoteProtocolError("invalid actions of a bundle: a list of lists is needed")
    if type(check_after) is not int or not 0 <= check_after <= limits.TIME:
        raise RemoteProtocolError(f"invalid check_after {check_after!r:.200} of a bundle")
    if not isinstance(participants, tuple):
        raise RemoteProtocolError("invalid participants of a bundle: a list is needed")
    branches = [branch for branch in map(parse_participant, participants) if branch is not None]
    if len(branches) != len(participants):
        raise RemoteProtocolError("invalid participants of a bundle: one has no such form")
    if len(branches) > MAX_PARTICIPANTS:
        raise RemoteProtocolError(
            f"{len(branches)} participants of a bundle, more than {MAX_PARTICIPANTS}"
        )
    return BundleDescription(parsed, service, actions, check_after, tuple(branches))


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, tuple) or len(entry) != len(ENTRY_LIMITS) + 1:
        return False
    topic, *numbers = entry
    in_range = all(
        type(n) is int and 0 <= n <= most for n, most in zip(numbers, ENTRY_LIMITS, strict=True)
    )
    return in_range and isinstance(topic, str) and is_name(topic) is not None
