"""Payloads of the requests that carry data, and of their replies (docs/FORMATS.md 2.1).

Strings are a u8 length and bytes. Packing expects checked values. Unpacking checks
everything, and raises RemoteProtocolError. Bundles and chunks have their own modules.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from txmq.errors import RemoteProtocolError
from txmq.model.bundle import DecideReceipt
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.wire.bundle import read_state
from txmq.wire.payload_reader import PayloadReader, name_of, text_of, unfit


class Opcode(IntEnum):
    """The kind of a request; a reply repeats the opcode of its request."""

    HELLO = 1
    PING = 2
    CALL = 3
    LOGIN = 4
    SEND = 16
    GROUP = 17
    DECIDE = 18
    FETCH = 19
    ACK = 20
    READ = 21
    GROUPS = 22
    DECISIONS = 23
    SENDS = 24
    LETTERS = 25


SEND = struct.Struct("<HHIB")
SEND_RECEIPT = struct.Struct("<qqB")
DECIDE = struct.Struct("<B16sI")
DECIDE_AND_LENGTH = struct.Struct("<B16sIB")
OUTCOMES = {int(outcome): outcome for outcome in (COMMIT, ROLLBACK)}
DECIDE_RECEIPT = struct.Struct("<BB")
FETCH = struct.Struct("<IIII")
CHOICE = struct.Struct("<QI")  # of a fetch: tag filter, run
ACK = struct.Struct("<I")
RANGE = struct.Struct("<HHIqq")
FILTERED = 1  # flag of a range
COUNT = struct.Struct("<I")
TOPICS = struct.Struct("<H")
READ = struct.Struct("<IqII")
LETTERS = struct.Struct("<IqqI")
TOPIC_ID = struct.Struct("<Q")


class Send(NamedTuple):
    """Store a batch in a partition.

    `topic_epoch` is the topic's epoch as the sender knows it; 0 = not given.
    """

    topic: str
    partition: int
    topic_epoch: int
    batch: bytes


class SendReceipt(NamedTuple):
    """Offset of the first row of a stored batch.

    The offset is -1 while the batch is queued behind an undecided bundle of its key.
    """

    offset: int
    stored_at: int
    duplicate: bool = False


class Decide(NamedTuple):
    """Decide a transaction; `by` names the deciding process for the log."""

    outcome: Decision
    token: bytes
    epoch: int
    by: str


class Fetch(NamedTuple):
    """Lease messages to a member of a consumer group.

    The broker waits up to `max_wait_ms` for the first message. Batches without a bit of
    `tag_filter` are left out; 0 = all match. Neighbouring batches of at most `run` rows
    together may come as one chunk. Topics in `without` are left out.
    """

    generation: int
    max_wait_ms: int
    max_bytes: int
    max_messages: int
    group: str
    member: str
    tag_filter: int = 0
    run: int = 0
    without: tuple[str, ...] = ()


class AckedRange(NamedTuple):
    """Settled messages: offsets from `start` up to but not including `end`."""

    topic: str
    partition: int
    start: int
    end: int


class Ack(NamedTuple):
    """Acknowledge messages as processed. The `filtered` ones are not wanted by the
    member's tags or selector.
    """

    generation: int
    group: str
    member: str
    ranges: tuple[AckedRange, ...]
    filtered: tuple[AckedRange, ...] = ()


class Read(NamedTuple):
    """Read published messages from an offset on, without a consumer group.

    `topic_id`: the topic that the reader knows by that name; 0 = any.
    """

    partition: int
    offset: int
    max_wait_ms: int
    max_bytes: int
    topic: str
    topic_id: int = 0


class ReadLetters(NamedTuple):
    """Read the messages of the letters that a replay plan holds, at the offsets from
    `offset` up to but not including `end`.
    """

    partition: int
    offset: int
    end: int
    max_bytes: int
    plan: str
    topic: str


@lru_cache(maxsize=4096)
def send_header(topic: str, partition: int, topic_epoch: int) -> bytes:
    """Return the part of a SEND before its batch.

    Cached, because it is the same for all sends to a partition.
    """
    return SEND.pack(0, topic_epoch, partition, len(topic)) + topic.encode()


def unpack_send(payload: bytes) -> Send:
    try:
        flags, topic_epoch, partition, size = SEND.unpack_from(payload)
    except struct.error as error:
        raise RemoteProtocolError(f"a send of {len(payload)} bytes ends too early") from error
    _no_flags(flags)
    start = SEND.size + size
    if start > len(payload):
        raise RemoteProtocolError(
            f"a send of {len(payload)} bytes ends within the name of its topic"
        )
    return Send(name_of(payload[SEND.size : start]), partition, topic_epoch, payload[start:])


def pack_send_receipt(receipt: SendReceipt) -> bytes:
    return SEND_RECEIPT.pack(*receipt)


def unpack_send_receipt(payload: bytes) -> SendReceipt:
    if len(payload) != SEND_RECEIPT.size:
        raise RemoteProtocolError(f"a receipt has {len(payload)} bytes, not {SEND_RECEIPT.size}")
    offset, stored_at, duplicate = SEND_RECEIPT.unpack(payload)
    if offset < -1 or stored_at < 0 or duplicate > 1:
        raise RemoteProtocolError(
            f"invalid receipt: offset {offset}, time {stored_at}, duplicate {duplicate}"
        )
    return SendReceipt(offset, stored_at, duplicate == 1)


def pack_decide(request: Decide) -> bytes:
    return DECIDE.pack(request.outcome, request.token, request.epoch) + _string(request.by)


def unpack_decide(payload: bytes) -> Decide:
    try:
        outcome, token, epoch, size = DECIDE_AND_LENGTH.unpack_from(payload)
    except struct.error as error:
        raise RemoteProtocolError(f"a decision of {len(payload)} bytes ends too early") from error
    by = payload[DECIDE_AND_LENGTH.size :]
    if len(by) != size:
        raise RemoteProtocolError(f"a decision has {len(by)} bytes of a name of {size}")
    decision = OUTCOMES.get(outcome)
    if decision is None:
        raise RemoteProtocolError(f"invalid decision {outcome}")
    return Decide(decision, token, epoch, text_of(by))


def pack_decide_receipt(receipt: DecideReceipt) -> bytes:
    return DECIDE_RECEIPT.pack(*receipt)


def unpack_decide_receipt(payload: bytes) -> DecideReceipt:
    if len(payload) != DECIDE_RECEIPT.size:
        raise unfit(payload, DECIDE_RECEIPT.size)
    state, repeated = DECIDE_RECEIPT.unpack(payload)
    return DecideReceipt(read_state(state), _flag(repeated))


def pack_fetch(request: Fetch) -> bytes:
    return (
        FETCH.pack(*request[:4])
        + _string(request.group)
        + _string(request.member)
        + CHOICE.pack(request.tag_filter, request.run)
        + _names(request.without)
    )


def unpack_fetch(payload: bytes) -> Fetch:
    reader = PayloadReader(payload)
    generation, max_wait_ms, max_bytes, max_messages = reader.fields(FETCH)
    group, member = reader.group(), reader.name()
    tags, run = reader.fields(CHOICE)
    without = _read_names(reader)
    reader.end()
    return Fetch(
        generation, max_wait_ms, max_bytes, max_messages, group, member, tags, run, without
    )


def pack_ack(request: Ack) -> bytes:
    head = ACK.pack(request.generation) + _string(request.group) + _string(request.member)
    return head + _pack_ranges(request.ranges, request.filtered)


def pack_refused(refused: Sequence[AckedRange]) -> bytes:
    """Return the reply to an ACK: the ranges that were not accepted."""
    return _pack_ranges(refused)


def _pack_ranges(plain: Sequence[AckedRange], filtered: Sequence[AckedRange] = ()) -> bytes:
    names = dict.fromkeys(one.topic for one in (*plain, *filtered))
    topics = {topic: index for index, topic in enumerate(names)}
    ranges = [RANGE.pack(topics[topic], 0, *place) for topic, *place in plain]
    ranges += [RANGE.pack(topics[topic], FILTERED, *place) for topic, *place in filtered]
    return b"".join([COUNT.pack(len(ranges)), *ranges, _names(tuple(topics))])


def unpack_refused(payload: bytes) -> tuple[AckedRange, ...]:
    if not payload:
        return ()
    reader = PayloadReader(payload)
    ranges, filtered = _ranges(reader)
    reader.end()
    _no_flags(FILTERED if filtered else 0)
    return ranges


def _ranges(reader: PayloadReader) -> tuple[tuple[AckedRange, ...], tuple[AckedRange, ...]]:
    """Return the plain ranges, and the filtered ones."""
    (count,) = reader.fields(COUNT)
    rows = list(RANGE.iter_unpack(reader.read(RANGE.size * count)))
    topics = _read_names(reader)
    found: tuple[list[AckedRange], list[AckedRange]] = [], []
    for index, flags, *place in rows:
        if flags > FILTERED:
            _no_flags(flags)
        found[flags].append(_acked(topics, index, *place))
    return tuple(found[0]), tuple(found[1])


def unpack_ack(payload: bytes) -> Ack:
    reader = PayloadReader(payload)
    (generation,) = reader.fields(ACK)
    group, member = reader.group(), reader.name()
    ranges, filtered = _ranges(reader)
    reader.end()
    return Ack(generation, group, member, ranges, filtered)


def pack_read(request: Read) -> bytes:
    return READ.pack(*request[:4]) + _string(request.topic) + TOPIC_ID.pack(request.topic_id)


def unpack_read(payload: bytes) -> Read:
    reader = PayloadReader(payload)
    partition, offset, max_wait_ms, max_bytes = reader.fields(READ)
    topic = reader.name()
    (topic_id,) = reader.fields(TOPIC_ID)
    reader.end()
    if offset < 0:
        raise RemoteProtocolError(f"invalid offset {offset}")
    return Read(partition, offset, max_wait_ms, max_bytes, topic, topic_id)


def pack_read_letters(request: ReadLetters) -> bytes:
    return LETTERS.pack(*request[:4]) + _string(request.plan) + _string(request.topic)


def unpack_read_letters(payload: bytes) -> ReadLetters:
    reader = PayloadReader(payload)
    partition, offset, end, max_bytes = reader.fields(LETTERS)
    plan, topic = reader.name(), reader.name()
    reader.end()
    if not 0 <= offset < end:
        raise RemoteProtocolError(f"invalid offsets {offset} to {end}")
    return ReadLetters(partition, offset, end, max_bytes, plan, topic)


def _acked(topics: Sequence[str], index: int, partition: int, start: int, end: int) -> AckedRange:
    if index >= len(topics):
        raise RemoteProtocolError(f"a range names topic {index} of {len(topics)}")
    if not 0 <= start < end:
        raise RemoteProtocolError(f"invalid range of offsets {start} to {end}")
    return AckedRange(topics[index], partition, start, end)


def _names(topics: Sequence[str]) -> bytes:
    return b"".join([TOPICS.pack(len(topics)), *map(_string, topics)])


def _read_names(reader: PayloadReader) -> tuple[str, ...]:
    (count,) = reader.fields(TOPICS)
    return tuple(reader.name() for _ in range(count))


def _string(text: str) -> bytes:
    raw = text.encode()
    return bytes((len(raw),)) + raw


def _no_flags(flags: int) -> None:
    if flags:
        raise RemoteProtocolError(f"unknown flags {flags:#x}")


def _flag(number: int) -> bool:
    if number > 1:
        raise RemoteProtocolError(f"invalid flag {number}: it must be 0 or 1")
    return number == 1
