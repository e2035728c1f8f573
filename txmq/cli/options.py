"""Options and arguments that several commands take, and how their texts are read."""

from __future__ import annotations

import os
from datetime import datetime
from getpass import getuser
from typing import Annotated, NamedTuple
from uuid import UUID

import typer

from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.message import delay_level, is_name, micros

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
DEFAULT_BROKER = "txmq://127.0.0.1:7650"


def user() -> str:
    """Who runs this, by the operating system."""
    try:
        return getuser()
    except (KeyError, OSError):  # a container's user that has no name
        return f"uid-{os.getuid()}"


class Place(NamedTuple):
    """Where a message is."""

    topic: str
    partition: int
    offset: int


def place_of(text: str) -> Place:
    """The place in "TOPIC/PARTITION/OFFSET"."""
    topic, *numbers = text.split("/")
    if len(numbers) != 2 or not is_name(topic) or not all(map(is_number, numbers)):
        raise typer.BadParameter(
            f"{text!r} is no place of a message: TOPIC/PARTITION/OFFSET is needed"
        )
    return Place(topic, int(numbers[0]), int(numbers[1]))


def is_number(text: str) -> bool:
    """Whether `text` is digits, and so few that a number of the wire can hold them."""
    return text.isascii() and text.isdigit() and len(text) < 19  # as many as 2**63 has


def name_of(text: str) -> str:
    """A name, checked."""
    if not is_name(text):
        raise typer.BadParameter(f"{text!r} is no name: letters, digits and . _ - are possible")
    return text


def token_of(text: str) -> str:
    """A token, with hyphens or without."""
    try:
        return UUID(text).hex
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no token: 32 hexadecimal digits are needed"
        ) from None


def time_of(text: str) -> int:
    """Microseconds of a time like 2026-07-01T12:00:00Z; without a zone it is the local
    time.
    """
    try:
        return micros(datetime.fromisoformat(text).astimezone())
    except (ValueError, OverflowError, LocalProtocolError):
        raise typer.BadParameter(
            f"{text!r} is no time of a message: 2026-07-01T12:00:00Z would be one"
        ) from None


def seconds_of(text: str) -> float:
    """Seconds of a span like 90, 90s, 15m, 2h or 3d."""
    unit = UNITS.get(text[-1:], 0)
    try:
        found = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < limits.SPAN / 1_000_000:
        raise typer.BadParameter(
            f"{text!r} is no span of time: 90, 90s, 15m, 2h or 3d would be one"
        )
    return found


def delay_of(text: str) -> float:
    """Seconds of a span, or of one of RocketMQ's levels: level:5."""
    level, found, number = text.partition("level:")
    if not found or level:
        return seconds_of(text)
    try:
        return delay_level(int(number) if is_number(number) else 0).total_seconds()
    except LocalProtocolError as error:
        raise typer.BadParameter(str(error)) from None


class Pair(NamedTuple):
    """A name and its value."""

    name: str
    value: str


def pair_of(text: str) -> Pair:
    """The two sides of "NAME=VALUE"."""
    name, found, value = text.partition("=")
    if not found or not name:
        raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE")
    return Pair(name, value)


BrokerUrl = Annotated[
    str,
    typer.Option("--broker", envvar="TXMQ_BROKER", metavar="URL", help="The broker to speak to."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; errors too, and ask nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Reason = Annotated[str, typer.Option(help="Why; kept in the broker's log.")]
Operator = Annotated[
    str,
    typer.Option(
        default_factory=user,
        parser=name_of,
        metavar="NAME",
        show_default="your user name",
        help="Who; kept in the broker's log.",
    ),
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", parser=name_of, help="Name of the topic.")]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the consumer group.")]
Token = Annotated[
    str, typer.Argument(metavar="TOKEN", parser=token_of, help="Token of the transaction.")
]
