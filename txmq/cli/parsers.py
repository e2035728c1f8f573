"""Parsers of arguments and option values.

Durations look like 7d or 90s, sizes like 10GiB. Some settings also accept "default"
(the broker's setting) and "none" (no limit). Each raises typer.BadParameter.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import typer

from txmq.errors import LocalProtocolError
from txmq.model import content, limits
from txmq.model.content import Header
from txmq.model.measures import SECONDS_MS, SIZES, UNITS_MS, parse_measure
from txmq.model.message import delay_level, is_name, parse_message_id, to_micros
from txmq.model.units import DAY, MILLISECOND, SECOND

DEFAULT, NONE = "default", "none"
POLICIES = ("delete", "archive", DEFAULT)
SWITCHES = {"yes": True, "no": False, "true": True, "false": False}
AGO = re.compile(r"\d+[a-z]+")
INT64_DIGITS = 19  # of 2**63, the first number that the wire cannot hold


class MessagePlace(NamedTuple):
    """Topic, partition and offset of a message."""

    topic: str
    partition: int
    offset: int


class NameValue(NamedTuple):
    """A name and its value."""

    name: str
    value: str


class TimeOutOfRange(typer.BadParameter):
    """A time that no message can have."""


def parse_place(text: str) -> MessagePlace:
    """Parse the place of a message, TOPIC/PARTITION/OFFSET."""
    topic, *numbers = text.split("/")
    if len(numbers) != 2 or not is_name(topic) or not all(map(is_number, numbers)):
        raise typer.BadParameter(f"invalid place {text!r}: use TOPIC/PARTITION/OFFSET")
    return MessagePlace(topic, int(numbers[0]), int(numbers[1]))


def is_number(text: str) -> bool:
    """Return whether `text` is a decimal number that fits into 64 bits."""
    return text.isascii() and text.isdigit() and len(text) < INT64_DIGITS


def parse_name(text: str) -> str:
    """Parse the name of a topic, group or service."""
    if not is_name(text):
        raise typer.BadParameter(f"invalid name {text!r}: use letters, digits, '.', '_' and '-'")
    return text


def parse_token(text: str) -> str:
    """Parse a token, with or without hyphens."""
    return _parse_id(text, "token")


def parse_log_id(text: str) -> str:
    """Parse the id of a broker's log."""
    return _parse_id(text, "id of a log")


def parse_directory_id(text: str) -> str:
    """Parse the id of a data directory."""
    return _parse_id(text, "id of a data directory")


def parse_store_id(text: str) -> str:
    """Parse the id of a consumer's local store."""
    return _parse_id(text, "id of a store")


def _parse_id(text: str, kind: str) -> str:
    try:
        return UUID(text).hex
    except ValueError:
        raise typer.BadParameter(f"invalid {kind} {text!r}: use 32 hexadecimal digits") from None


def parse_message(text: str) -> str:
    """Parse the id of a message."""
    try:
        parse_message_id(text)
    except LocalProtocolError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}") from None
    return text


def parse_message_or_place(text: str) -> str | MessagePlace:
    """Parse the id of a message, or its place as logs print it."""
    return parse_place(text) if "/" in text else parse_message(text)


def parse_time(text: str) -> int:
    """Parse a time like 2026-07-01T12:00:00Z into microseconds.

    A time without a zone is local time.
    """
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"invalid time {text!r}: use a time like 2026-07-01T12:00:00Z"
        ) from None
    try:
        return to_micros(when.astimezone())
    except (ValueError, OverflowError, LocalProtocolError):
        raise TimeOutOfRange(f"time {text!r} is out of range: use 1970 to 9999") from None


def parse_duration(text: str) -> float:
    """Parse a duration like 90s, 15m, 2h or 3d into seconds, which need no unit."""
    seconds = _parse_measure(text, SECONDS_MS, "duration", "90, 90s, 15m, 2h or 3d") / 1_000
    if seconds >= limits.DURATION / SECOND:
        raise typer.BadParameter(
            f"invalid duration {text!r}: use less than {limits.DURATION // DAY}d"
        )
    return seconds


def parse_delay(text: str) -> float:
    """Parse a duration, or one of RocketMQ's delay levels (level:5), into seconds."""
    before, separator, number = text.partition("level:")
    if before or not separator:
        return parse_duration(text)
    try:
        return delay_level(int(number) if is_number(number) else 0).total_seconds()
    except LocalProtocolError as error:
        raise typer.BadParameter(str(error)) from None


def parse_header(text: str) -> NameValue:
    """Parse a header, NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise typer.BadParameter(f"invalid header {text!r}: use NAME=VALUE")
    return NameValue(name, value)


def parse_header_criterion(text: str) -> Header:
    """Parse a header to look for, NAME or NAME=VALUE."""
    try:
        return content.parse_header(text)
    except LocalProtocolError as error:
        raise typer.BadParameter(str(error)) from None


def parse_body_criterion(text: str) -> str:
    """Check what bodies are searched for: a text, or a path and a value."""
    try:
        content.body_criterion(text)
    except LocalProtocolError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def parse_milliseconds(text: str) -> int:
    """Parse a duration like "36h" into milliseconds."""
    return _parse_measure(text, UNITS_MS, "time", "a number and ms, s, m, h, d or w, as in 36h")


def parse_bytes(text: str) -> int:
    """Parse a size like "10GiB" into bytes."""
    return _parse_measure(text, SIZES, "size", "a number and B, KiB, MiB, GiB or TiB, as in 10GiB")


def parse_named_limit(text: str, names: Sequence[str]) -> tuple[str, int]:
    """Parse NAME=VALUE; a size may have a unit where the name says bytes."""
    name, _, value = text.partition("=")
    if name not in names:
        raise typer.BadParameter(f"there is no limit {name!r}: use {', '.join(names)}")
    if is_number(value):
        return name, int(value)
    if "bytes" in name:
        return name, parse_bytes(value)
    raise typer.BadParameter(f"invalid {name} {value!r}: use a whole number")


def parse_moment(text: str) -> int:
    """Parse a time, or how long ago it was, like "2h", into microseconds since the
    epoch.
    """
    if AGO.fullmatch(text) is None:
        return parse_time(text)
    return max(0, time.time_ns() // 1_000 - parse_milliseconds(text) * MILLISECOND)


def parse_time_limit(text: str) -> int | str:
    """Parse a duration into milliseconds, "none" into 0; keep "default"."""
    return _parse_or_default(text, parse_milliseconds)


def parse_size_limit(text: str) -> int | str:
    """Parse a size into bytes, "none" into 0; keep "default"."""
    return _parse_or_default(text, parse_bytes)


def parse_flush(text: str) -> str | list[int]:
    """Parse a flush policy: "sync", "default", or a time and messages like
    "10ms,1000".
    """
    if text in ("sync", DEFAULT):
        return text
    time, _, messages = text.partition(",")
    milliseconds = parse_milliseconds(time) if is_number(messages) else 0
    if not (0 < milliseconds <= limits.FLUSH_MS and 0 < int(messages) <= limits.FLUSH_MESSAGES):
        raise typer.BadParameter(
            f"invalid flush policy {text!r}: use sync, default, or a time of 1ms to "
            f"{limits.FLUSH_MS}ms and 1 to {limits.FLUSH_MESSAGES} messages, as in 10ms,1000"
        )
    return [milliseconds, int(messages)]


def parse_size_or_default(text: str) -> int | str:
    """Parse a size into bytes; keep "default"."""
    return DEFAULT if text == DEFAULT else parse_bytes(text)


def parse_policy(text: str) -> str:
    """Parse a policy for segments that retention removes."""
    if text not in POLICIES:
        raise typer.BadParameter(f"invalid policy {text!r}: use {', '.join(POLICIES)}")
    return text


def parse_switch(text: str) -> bool:
    """Parse yes or no."""
    if text not in SWITCHES:
        raise typer.BadParameter(f"invalid value {text!r}: use yes or no")
    return SWITCHES[text]


def _parse_or_default(text: str, measure: Callable[[str], int]) -> int | str:
    if text == DEFAULT:
        return DEFAULT
    return 0 if text == NONE else measure(text)


def _parse_measure(text: str, units: Mapping[str, int], kind: str, form: str) -> int:
    """Parse a number and its unit. `kind` and `form` are for the error."""
    try:
        return parse_measure(text, units, kind, form)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
