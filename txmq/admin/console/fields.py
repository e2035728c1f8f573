"""Fields of forms: what their texts become, and how people read them.

A parser raises ValueError for a wrong text. An empty field is left out, so that it
leaves a setting as it is; those of `SAYING` say something when they are empty.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from math import isfinite, nan
from typing import Any, NamedTuple

from txmq.admin.addresses import is_whole_number
from txmq.admin.console.words import label
from txmq.model.access import ROLES
from txmq.model.measures import SECONDS_MS, SIZES, parse_measure
from txmq.model.units import MILLISECOND
from txmq.wire.calls.users import VerifierArgs
from txmq.wire.scram import new_verifier

Parse = Callable[[str], Any]


def text(value: str) -> str:
    """Return a text without spaces around it."""
    return value.strip()


def number(value: str) -> int:
    """Return a whole number."""
    if not is_whole_number(value.strip()):
        raise ValueError(f"{value[:64]!r} is not a whole number")
    return int(value)


def decimal(value: str) -> float:
    """Return a number, which may have a fraction."""
    try:
        found = float(value)
    except ValueError:
        found = nan
    if not isfinite(found):
        raise ValueError(f"{value[:64]!r} is not a number")
    return found


def flag(value: str) -> bool:
    """Return the value of a check box."""
    return value not in ("", "no", "false")


def names(value: str) -> list[str]:
    """Return names that are separated by commas or spaces."""
    return value.replace(",", " ").split()


def duration_ms(value: str) -> int:
    """Return a duration in milliseconds; a number alone is seconds."""
    return parse_measure(value.strip(), SECONDS_MS, "duration", "60, 90s, 15min, 2h or 3d")


def size(value: str) -> int:
    """Return a number of bytes."""
    return parse_measure(value.strip(), SIZES, "size", "a number, or one as 10MiB")


def or_default(parse: Parse) -> Parse:
    """Return a parser that keeps "default", by which a topic has the broker's value."""
    return lambda value: value.strip() if value.strip() == "default" else parse(value)


def delays(value: str) -> list[int]:
    """Return durations in microseconds, which are separated by commas."""
    return [duration_ms(one) * MILLISECOND for one in value.split(",")]


def secret(value: str) -> str:
    """Return a password as it was typed."""
    return value


def body(value: str) -> str:
    """Return a body in base64; browsers send line breaks as CR LF."""
    return b64encode(value.replace("\r\n", "\n").encode()).decode()


def headers(value: str) -> dict[str, str]:
    """Return headers, one in a line as `name: value`."""
    found: dict[str, str] = {}
    for line in value.replace("\r\n", "\n").split("\n"):
        if line.strip():
            name, colon, rest = line.partition(":")
            if not colon or name.strip() in found:
                raise ValueError(f"{line[:64]!r} is no header: use `name: value`, each name once")
            found[name.strip()] = rest.strip()
    return found


def place(value: str) -> list[Any]:
    """Return a message's place, topic/partition/offset."""
    parts = value.split("/")
    if len(parts) != 3:
        raise ValueError(f"{value[:64]!r} is no place of a message: use topic/partition/offset")
    return [parts[0], number(parts[1]), number(parts[2])]


def role(value: str) -> str:
    """Return a role."""
    if value not in ROLES:
        raise ValueError(f"{value[:64]!r} is no role: use {', '.join(ROLES)}")
    return value


def position(value: str) -> object:
    """Return where a group is reset to: first, last, or a time in microseconds."""
    if value in ("first", "last"):
        return value
    return int(value) if is_whole_number(value.removeprefix("-")) else value


SAYING = (body, str)
REPEATED = (place, role)  # each value of a name is one of a list; an empty one is none


class Field(NamedTuple):
    """A field that people fill in: its name, its label, and what its text becomes.

    One with `choices` is a list to choose from.
    """

    name: str
    label: str
    parse: Parse = text
    size: int = 10
    choices: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The type of its element."""
        return "password" if self.parse is secret else "text"


def parsers(*tables: tuple[Field, ...]) -> Mapping[str, Parse]:
    """Return the parsers of fields by name."""
    return {one.name: one.parse for table in tables for one in table}


def verifier_of(found: Mapping[str, Any]) -> dict[str, object]:
    """Return the verifier of a password that was typed twice, or nothing for none. It
    takes the broker some milliseconds, as each first login does. Raises ValueError.
    """
    first, second = found.get("password", ""), found.get("again", "")
    if first != second:
        raise ValueError("the two passwords differ")
    return {"password": VerifierArgs.of(new_verifier(first))} if first else {}


YES_NO = ("yes", "no")
TOPIC_SETTINGS = (
    Field("retention_ms", "Keep messages for, as 7d; 0 = no limit", or_default(duration_ms)),
    Field("retention_bytes", "Keep at most, as 10GiB; 0 = no limit", or_default(size)),
    Field("letters_ms", "Keep dead letters for, as 30d; 0 = no limit", or_default(duration_ms)),
    Field("message_bytes", "Largest message, as 1MiB", or_default(size)),
    Field("writable", "Writable", flag, choices=YES_NO),
    Field("readable", "Readable", flag, choices=YES_NO),
)
RETRY = (
    Field("delays_us", "Delays in seconds or as 5min, by commas; the last repeats", delays, 44),
    Field("retries", "Retries; none given = one for each delay", number, 8),
    Field("jitter", "Vary delays by up to this share", decimal, 5),
    Field("dead", "Errors that are not retried, as billing.CardRefused or billing.*", names, 30),
    Field("postpone", "Errors that count as no attempt", names, 30),
)
FAILURES = (
    Field("on_exhausted", "After the last retry", choices=("park", "skip", "block")),
    Field("flood_keys", "Breaker opens when so many keys fail alike; 0 = never", number),
    Field("max_parked", "Messages parked behind one key at most; then it stops", number),
    Field("span", "Deliver at most so far beyond the first unsettled; 0 = any", number),
    Field("keep_until_exported", "Keep letters until exported", flag, choices=YES_NO),
    Field(
        "alarm_severity", "Severity of its alarms",
        choices=("default", "critical", "warning", "off"),
    ),
)  # fmt: skip
LIMITS = (
    Field("lease_ms", "Lease of a delivery", duration_ms),
    Field("session_ms", "A silent member is lost after", duration_ms),
    Field("consume_timeout_ms", "Longest time of a handler", duration_ms),
    Field("messages_per_s", "Messages per second, all members; 0 = no limit", number),
    Field("cold_bytes_per_s", "Bytes per second of old messages; 0 = no limit", size),
)
QUOTA = (
    Field("bytes_per_s", "Bytes per second", size),
    Field("requests_per_s", "Requests per second", number),
    Field("topics", "Topics that the user makes", number),
    Field("undecided", "Undecided transactions", number),
    Field("connections", "Connections", number),
)
PASSWORD = (
    Field("password", "New password", secret, 16),
    Field("again", "The same again", secret, 16),
)
PLAN = (
    Field("rate", "Letters per second; 0 = no limit", decimal, 8),
    Field("ramp_s", "Full rate after (s)", decimal, 6),
    Field("canary", "Canary: first letters", number, 6),
    Field("stop_share", "Pause when more than this share fails alike", decimal, 5),
    Field("stop_after", "Last outcomes that count for it; 0 = never", number, 5),
    Field("in_flight", "Without an outcome at most; 0 = any number", number, 6),
)
# of settings, by the names that people read
MEANINGS = {
    label(one.name): one.label
    for table in (TOPIC_SETTINGS, RETRY, FAILURES, LIMITS, QUOTA, PLAN)
    for one in table
}
PLAN_FLAGS = {
    "pause": "pause behind the canary",
    "second_approver": "another user has to approve it",
    "start": "start it as soon as it may",
}
