"""The values that users of txmq hold: what is sent, what comes back, what is delivered.

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

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
DELAY_LEVELS = (1, 5, 10, 30, *range(60, 601, 60), 1_200, 1_800, 3_600, 7_200)  # seconds

_NAME = re.compile(rf"(?!\.)[A-Za-z0-9._-]{{1,{limits.NAME}}}")
_MESSAGE_ID = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,18})")


class Decision(IntEnum):
    """The answer to "what became of this transaction?"; the numbers are those of the
    wire and the log.
    """

    COMMIT = 1
    ROLLBACK = 2
    UNKNOWN = 3  # not decided, or not known here: ask again later


COMMIT, ROLLBACK, UNKNOWN = Decision


class Message(NamedTuple):
    """A message to send.

    Messages of one `key` stay in order; consumers may choose by `tag`. It is not
    delivered before `deliver_at` nor after `expire_at`: a datetime with a time zone, or
    microseconds since the epoch. `delay` and `ttl` say the same in seconds, or as a
    timedelta: from when it would be delivered otherwise (in a transaction from the
    commit), and from when it can be delivered. All of it is by the broker's clock.
    """

    body: bytes
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] | None = None
    deliver_at: int | datetime | None = None
    expire_at: int | datetime | None = None
    delay: float | timedelta | None = None
    ttl: float | timedelta | None = None


class Receipt(NamedTuple):
    """The broker's word that a message is stored. `offset` is None while it waits, for
    its time of delivery or behind an undecided half of its key.

    `duplicate`: this message had been stored by an earlier attempt to send it; it is in
    the topic once.
    """

    message_id: str
    topic: str
    partition: int
    offset: int | None
    duplicate: bool


class ReceivedMessage(NamedTuple):
    """A message as delivered.

    `attempt` is 1 at the first delivery; `born_at` is by the sender's clock,
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


def is_name(text: str) -> bool:
    """Whether `text` may name a topic, a consumer group, a service or a member."""
    return _NAME.fullmatch(text) is not None


def check_name(text: str, what: str) -> str:
    """`text`, where it may name a `what` ("topic"); else LocalProtocolError."""
    if not isinstance(text, str) or not is_name(text):
        hint = f"1 to {limits.NAME} characters out of A-Z a-z 0-9 . _ -, not beginning with a dot"
        raise LocalProtocolError(f"{str(text)[: limits.NAME]!r} cannot name a {what}", hint=hint)
    return text


def micros(when: int | datetime | None) -> int:
    """A time as microseconds since the epoch, None as 0. LocalProtocolError where a
    message cannot carry it.
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
        hint = "a datetime with a time zone, or an int of microseconds since 1970: time.time_ns() // 1000"
        raise LocalProtocolError(f"{when!r} is no time of a message", hint=hint)
    return when


def span(length: float | timedelta | None) -> int:
    """Seconds or a timedelta as microseconds, None as 0. LocalProtocolError where a
    message cannot carry it.
    """
    if length is None:
        return 0
    try:
        found = (
            length // MICROSECOND if isinstance(length, timedelta) else round(length * 1_000_000)
        )
    except (TypeError, ValueError, OverflowError):
        found = -1
    if not 0 <= found < limits.SPAN or isinstance(length, bool):
        hint = "seconds, or a timedelta, shorter than ten years"
        raise LocalProtocolError(f"{length!r} is no span of time for a message", hint=hint)
    return found


def time_or_span(when: int | datetime | None, length: float | timedelta | None) -> int:
    """What a message carries of a time, or of a span instead: a number below
    `limits.SPAN` is a span (FORMATS 3).

    LocalProtocolError for both at once, and for times that could be taken for spans:
    seconds, or milliseconds.
    """
    if length is None:
        found = 0 if when is None else micros(when)
        if 0 < found < limits.SPAN:
            hint = "times are in microseconds since 1970; for a span say delay= or ttl="
            raise LocalProtocolError(f"{when!r} is too early to be a time of a message", hint=hint)
        return found
    if when is not None:
        raise LocalProtocolError(
            "a time and a span at once", hint="deliver_at or delay, expire_at or ttl"
        )
    return span(length)


def at_time(carried: int, start: int) -> int:
    """When that is which a message carries: spans are from `start`. 0 stays 0: at once,
    or never.
    """
    return start + carried if 0 < carried < limits.SPAN else carried


def delay_level(level: int) -> timedelta:
    """The delay of one of MetaQ's and RocketMQ's 18 levels, from 1. Raises
    LocalProtocolError.
    """
    if type(level) is not int or not 1 <= level <= len(DELAY_LEVELS):
        raise LocalProtocolError(
            f"{level!r} is no level of delay", hint=f"1 to {len(DELAY_LEVELS)}"
        )
    return timedelta(seconds=DELAY_LEVELS[level - 1])


def message_id(producer_id: bytes, sequence: int) -> str:
    """The id of a producer's message with that sequence; in a transaction: of its token
    and the place in the group.
    """
    return f"{producer_id.hex()}-{sequence}"


def message_ids(producer_id: bytes, sequences: Iterable[int]) -> list[str]:
    """The ids of a producer's messages with these sequences."""
    prefix = producer_id.hex()
    return [f"{prefix}-{sequence}" for sequence in sequences]


def parse_message_id(text: str) -> tuple[bytes, int]:
    """Producer id and sequence of a message id. LocalProtocolError where it is none."""
    found = _MESSAGE_ID.fullmatch(text)
    if found is None or int(found[2]) > limits.SEQUENCE:
        hint = "a message id is 32 hexadecimal digits, a hyphen and a number"
        raise LocalProtocolError(f"{text[:80]!r} is no message id", hint=hint)
    return bytes.fromhex(found[1]), int(found[2])
