"""`txmq tail`: print the messages of a topic as they arrive, without a consumer group.

It leases and acks nothing, and keeps no positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast
from uuid import UUID

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import Topic
from txmq.cli.output import format_time
from txmq.cli.parsers import TimeOutOfRange, is_number, parse_moment
from txmq.cli.rows import body_fields
from txmq.model.printable import escape_unprintable
from txmq.model.topic_partition import PartitionName

if TYPE_CHECKING:
    from txmq.client.blocking.client import Client
    from txmq.model.message import ReceivedMessage

app = typer.Typer()


class Start(NamedTuple):
    """First message of each partition to print: the one at an offset, or else the first
    one that was stored at a time or later.
    """

    offset: str | int = "first"
    time: int | None = None


def _parse_start(text: str) -> Start:
    if text in ("first", "last"):
        return Start(text)
    if is_number(text):
        return Start(int(text))
    try:
        return Start(time=parse_moment(text))
    except typer.BadParameter as error:
        # Digits alone are meant as an offset, though they may be a date.
        if isinstance(error, TimeOutOfRange) and not text.isdigit():
            raise
        raise typer.BadParameter(
            f"invalid start {text!r}: use first, last, an offset, a time like "
            "2026-07-01T12:00:00Z, or how long ago, as 2h"
        ) from None


From = Annotated[
    Start | None,
    typer.Option(
        "--from",
        parser=_parse_start,
        metavar="START",
        help="Where to begin: first, last (new messages only), an offset, a time of storage "
        "like 2026-07-01T12:00Z (local time without a zone), or how long ago, as 2h.",
        show_default="last; first with --no-follow",
    ),
]
Partition = Annotated[
    list[int] | None, typer.Option(min=0, help="Only this partition; can be repeated.")
]
Count = Annotated[
    int | None, typer.Option("--count", "-n", min=1, help="Stop after this many messages.")
]
Follow = Annotated[bool, typer.Option(help="Wait for new messages, or stop at the current end.")]


@broker_command(app, "tail", example="txmq tail orders --from 2h --no-follow")
def tail(
    session: CommandSession,
    topic: Topic,
    *,
    start: From = None,
    partition: Partition = None,
    count: Count = None,
    follow: Follow = True,
) -> None:
    """Print the messages of a topic, one per line, until interrupted."""
    bounds = _bounds(session, topic, partition)
    begin = start or Start("last" if follow else "first")
    if begin.time is None:
        starts = {number: _start_offset(begin.offset, *both) for number, both in bounds.items()}
    else:
        starts = {
            number: _offset_at_time(session, topic, number, end, begin.time)
            for number, (_first, end) in bounds.items()
        }
    client = cast("Client", session.client)
    if follow:
        messages = follow_topic(client, topic, starts, partition)
    else:
        ends = {number: end for number, (_first, end) in bounds.items()}
        messages = read_topic(client, topic, starts, ends)
    try:
        for message in islice(messages, count):
            session.out.print_line(json_fields(message), text_line(message))
    except KeyboardInterrupt:  # the usual end of a tail
        return


def _bounds(
    session: CommandSession, topic: str, partitions: list[int] | None
) -> dict[int, tuple[int, int]]:
    """Return the first offset and the end offset of each partition to read."""
    shown = session.client.call("topic.show", name=topic)
    bounds = dict(enumerate(zip(shown["firsts"], shown["ends"], strict=True)))
    missing = [number for number in partitions or () if number not in bounds]
    if missing:
        raise typer.BadParameter(
            f"topic {topic} has no partition {missing[0]}: use 0 to {len(bounds) - 1}"
        )
    return {number: bounds[number] for number in partitions} if partitions else bounds


def _start_offset(start: str | int, first: int, end: int) -> int:
    return (
        {"first": first, "last": end}[start]
        if isinstance(start, str)
        else min(max(start, first), end)
    )


def _offset_at_time(
    session: CommandSession, topic: str, partition: int, end: int, time: int
) -> int:
    """Return the first offset that was stored at a time or later, or else the end."""
    query = {"topic": topic, "partition": partition, "start": time, "limit": 1}
    found: list[dict[str, int]] = session.client.call("message.find", **query)["messages"]
    return found[0]["offset"] if found else end


def read_topic(
    client: Client, topic: str, starts: Mapping[int, int], ends: Mapping[int, int]
) -> Iterator[ReceivedMessage]:
    """Yield the messages of partitions from their starts to their ends, one partition
    after the other.
    """
    for partition, start in starts.items():
        at, end = start, ends[partition]
        while at < end:
            found = client.read(topic, partition, at)
            yield from (message for message in found.messages if message.offset < end)
            at = max(at, found.next_offset)


def follow_topic(
    client: Client, topic: str, starts: Mapping[int, int], partitions: list[int] | None
) -> Iterator[ReceivedMessage]:
    """Yield the messages of partitions from their starts on, each in order, and wait
    for more. Without `partitions` those are read as well that the topic will have.
    """
    positions = Positions({(topic, number): offset for number, offset in starts.items()})
    with client.reader("tail", [topic], positions) as reader:
        if partitions:
            reader.assign([(topic, number) for number in partitions])
        yield from reader


class Positions:
    """The positions at which a reader begins; those that it comes to are not kept."""

    def __init__(self, starts: Mapping[PartitionName, int]) -> None:
        self._starts = starts

    def load(self, name: str, log_id: UUID) -> Mapping[PartitionName, int]:
        """Return the first positions."""
        del name, log_id
        return self._starts

    def save(self, name: str, log_id: UUID, offsets: Mapping[PartitionName, int]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def json_fields(message: ReceivedMessage) -> dict[str, Any]:
    """Return the fields of a message for JSON."""
    fields = message._asdict() | {"headers": dict(message.headers)}
    del fields["body"], fields["attempt"]
    return fields | body_fields(message.body)


def text_line(message: ReceivedMessage) -> str:
    """Return a message as one line of text."""
    place = f"{message.topic}/{message.partition}/{message.offset}"
    attributes = {"key": message.key, "tag": message.tag} | dict(message.headers)
    words = [format_time(message.stored_at), place]
    words += [
        escape_unprintable(f"{name}={value}")
        for name, value in attributes.items()
        if value is not None
    ]
    ((_, body),) = body_fields(message.body).items()
    return " ".join([*words, escape_unprintable(body)])
