"""The values that users of txmq hold: what is sent, what comes back, what is delivered.

Times are microseconds since the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from txmq import limits
from txmq.errors import LocalProtocolError

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

_NAME = re.compile(rf"(?!\.)[A-Za-z0-9._-]{{1,{limits.NAME}}}")
_MESSAGE_ID = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,18})")


class Decision(IntEnum):
    """The answer to "what became of this transaction?"; the numbers are those of the wire and the log."""

    COMMIT = 1
    ROLLBACK = 2
    UNKNOWN = 3  # not decided, or not known here: ask again later


COMMIT, ROLLBACK, UNKNOWN = Decision


class Message(NamedTuple):
    """A message to send.

    Messages of one `key` stay in order; consumers may choose by `tag`. It is not delivered before `deliver_at` nor
    after `expire_at`: a datetime with a time zone, or microseconds since the epoch.
    """

    body: bytes
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] | None = None
    deliver_at: int | datetime | None = None
    expire_at: int | datetime | None = None


class Receipt(NamedTuple):
    """The broker's word that a message is stored. `offset` is None while it waits behind an undecided half of its key.

    `duplicate`: this message had been stored by an earlier attempt to send it; it is in the topic once.
    """

    message_id: str
    topic: str
    partition: int
    offset: int | None
    duplicate: bool


class ReceivedMessage(NamedTuple):
    """A message as delivered.

    `attempt` is 1 at the first delivery; `born_at` is by the sender's clock, `stored_at` by the broker's.
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
    """A time as microseconds since the epoch, None as 0. LocalProtocolError where a message cannot carry it."""
    if when is None:
        return 0
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise LocalProtocolError(f"{when} has no time zone", hint="use datetime.now(UTC) or .astimezone()")
        when = (when - EPOCH) // MICROSECOND
    if type(when) is not int or not 0 <= when <= limits.TIME:
        hint = "a datetime with a time zone, or an int of microseconds since 1970: time.time_ns() // 1000"
        raise LocalProtocolError(f"{when!r} is no time of a message", hint=hint)
    return when


def message_id(producer_id: bytes, sequence: int) -> str:
    """The id of a producer's message with that sequence; in a transaction: of its token and the place in the group."""
    return f"{producer_id.hex()}-{sequence}"


def parse_message_id(text: str) -> tuple[bytes, int]:
    """Producer id and sequence of a message id. LocalProtocolError where it is none."""
    found = _MESSAGE_ID.fullmatch(text)
    if found is None or int(found[2]) > limits.SEQUENCE:
        hint = "a message id is 32 hexadecimal digits, a hyphen and a number"
        raise LocalProtocolError(f"{text[:80]!r} is no message id", hint=hint)
    return bytes.fromhex(found[1]), int(found[2])
