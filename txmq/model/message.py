"""Values of the public API: messages to send, receipts, delivered messages.

Times are microseconds since the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.durations import MICROSECOND, Duration, micros_of

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DELAY_LEVELS = (1, 5, 10, 30, *range(60, 601, 60), 1_200, 1_800, 3_600, 7_200)  # seconds

# of a text that can name a topic, group, service or member
NAME_PATTERN = rf"(?!\.)[A-Za-z0-9._-]{{1,{limits.NAME}}}"
# the method of the pattern itself, because every request is full of names
is_name = re.compile(NAME_PATTERN).fullmatch
_MESSAGE_ID = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,18})")


class Decision(IntEnum):
    """Answer to "was this transaction committed?"; numbers of wire and log."""

    COMMIT = 1
    ROLLBACK = 2
    UNKNOWN = 3  # undecided, or unknown to this checker: the broker asks again later


COMMIT, ROLLBACK, UNKNOWN = Decision


class Message(NamedTuple):
    """A message to send.

    Messages of one `key` stay in order. Consumers may select by `tag`. The message is
    not delivered before `deliver_at` nor after `expire_at`: each a datetime with a time
    zone, or microseconds since the epoch. `delay` and `ttl` give the same as durations,
    in seconds or as a timedelta. `delay` counts from the send, in a transaction from
    the commit; `ttl` counts from the time when the message can be delivered. The
    broker's clock decides.
    """

    body: bytes
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] | None = None
    deliver_at: int | datetime | None = None
    expire_at: int | datetime | None = None
    delay: Duration | None = None
    ttl: Duration | None = None


class Receipt(NamedTuple):
    """The broker's confirmation that a message is stored.

    `offset` is None while the message waits: for its time of delivery, or behind an
    undecided message of its key. `duplicate`: an earlier attempt of the same send had
    stored the message; it is in the topic once.
    """

    message_id: str
    topic: str
    partition: int
    offset: int | None
    duplicate: bool

    @property
    def spooled(self) -> bool:
        """True for a message that waits on local disk, in the client's spool."""
        return False


class SpooledReceipt(Receipt):
    """The receipt of a message that is on local disk, because no broker answered.

    It has no `offset`. `partition` is -1 while the topic is not known.
    `client.spool.place(receipt)` waits for the broker's receipt.
    """

    __slots__ = ()

    @property
    def spooled(self) -> bool:
        return True


class ReceivedMessage(NamedTuple):
    """A delivered message.

    `attempt` is 1 at the first delivery. `born_at` is by the sender's clock,
    `stored_at` by the broker's.
    """

    topic: str
    partition: int
    offset: int
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    body: bytes
    message_id: str
    attempt: int
    born_at: int
    stored_at: int


def check_name(text: str, kind: str) -> str:
    """Return a valid name of this kind ("topic"). Raises LocalProtocolError."""
    if not isinstance(text, str) or not is_name(text):
        hint = f"use 1 to {limits.NAME} characters of A-Z a-z 0-9 . _ -, not beginning with a dot"
        raise LocalProtocolError(f"invalid {kind} name {str(text)[: limits.NAME]!r}", hint=hint)
    return text


def to_micros(when: int | datetime | None) -> int:
    """Return a time as microseconds since the epoch, None as 0.

    Raises LocalProtocolError where a message cannot carry it.
    """
    if when is None:
        return 0
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise LocalProtocolError(
                f"{when} has no time zone", hint="use datetime.now(UTC) or .astimezone()"
            )
        when = (when - EPOCH) // MICROSECOND
    if type(when) is not int or not 0 <= when <= limits.TIME:
        hint = "use a datetime with a time zone, or microseconds since 1970: time.time_ns() // 1000"
        raise LocalProtocolError(f"invalid time {when!r} of a message", hint=hint)
    return when


def time_or_duration(when: int | datetime | None, length: Duration | None) -> int:
    """Return the number that a message carries for a time, or for a duration instead.

    A number below `limits.DURATION` is a duration (docs/FORMATS.md 3). Raises
    LocalProtocolError for both at once, and for times so early that they would read as
    durations: those in seconds or milliseconds.
    """
    if length is None:
        micros = 0 if when is None else to_micros(when)
        if 0 < micros < limits.DURATION:
            hint = "use microseconds since 1970; for a duration use delay= or ttl="
            raise LocalProtocolError(f"{when!r} is too early for a time of a message", hint=hint)
        return micros
    if when is not None:
        raise LocalProtocolError(
            "a message has a time and a duration at once",
            hint="use either deliver_at or delay, and either expire_at or ttl",
        )
    return 0 if length is None else micros_of(length, "delay or ttl")


def resolve_time(carried: int, start: int) -> int:
    """Return the time that a carried number means: a duration counts from `start`.

    0 stays 0: at once, or never.
    """
    return start + carried if 0 < carried < limits.DURATION else carried


def duration_of(carried: int) -> int:
    """Return the duration that a carried number means; 0 = it is a time."""
    return carried if carried < limits.DURATION else 0


def delay_level(level: int) -> timedelta:
    """Return the delay of one of RocketMQ's 18 levels, from 1.

    Raises LocalProtocolError.
    """
    if type(level) is not int or not 1 <= level <= len(DELAY_LEVELS):
        raise LocalProtocolError(
            f"invalid delay level {level!r}", hint=f"use 1 to {len(DELAY_LEVELS)}"
        )
    return timedelta(seconds=DELAY_LEVELS[level - 1])


def message_id(producer_id: bytes, sequence: int) -> str:
    """Return the id of the message with that sequence.

    `producer_id` is the producer's, or in a transaction the token; `sequence` then is
    the message's number in the bundle.
    """
    return f"{producer_id.hex()}-{sequence}"


def message_ids(producer_id: bytes, sequences: Iterable[int]) -> list[str]:
    """Return the ids of a producer's messages with these sequences."""
    prefix = producer_id.hex()
    return [f"{prefix}-{sequence}" for sequence in sequences]


def is_message_id(text: str) -> bool:
    """Return whether a text is the id of a message."""
    match = _MESSAGE_ID.fullmatch(text)
    return match is not None and int(match[2]) <= limits.SEQUENCE


def parse_message_id(text: str) -> tuple[bytes, int]:
    """Return producer id and sequence of a message id. Raises LocalProtocolError."""
    match = _MESSAGE_ID.fullmatch(text)
    if match is None or int(match[2]) > limits.SEQUENCE:
        hint = "a message id is 32 hexadecimal digits, a hyphen and a number"
        raise LocalProtocolError(f"invalid message id {text[:80]!r}", hint=hint)
    return bytes.fromhex(match[1]), int(match[2])
