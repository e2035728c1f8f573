"""`txmq tail`: print the messages of a topic as they arrive, without a consumer group.

It leases and acks nothing. One connection has a long poll for each partition.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import Topic
from txmq.cli.output import format_time
from txmq.cli.parsers import TimeOutOfRange, is_number, parse_moment
from txmq.cli.rows import body_fields
from txmq.model.printable import escape_unprintable

if TYPE_CHECKING:
    from txmq.client.blocking.connections.connection import Connection
    from txmq.model.message import ReceivedMessage
    from txmq.wire.chunks import Chunk, Chunks

app = typer.Typer()
WAIT_MS = 20_000
READ_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 60.0  # longer than WAIT_MS


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
    ends = {number: end for number, (_first, end) in bounds.items()}
    reader = TopicReader(session.url, topic)
    try:
        for message in islice(read_partitions(reader, starts, None if follow else ends), count):
            session.out.print_line(json_fields(message), text_line(message))
    except KeyboardInterrupt:  # the usual end of a tail
        return
    finally:
        reader.close()


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


class TopicPolls(Protocol):
    """Long polls of the partitions of a topic."""

    def poll(self, partition: int, offset: int, wait_ms: int) -> None:
        """Send a long poll."""

    def replies(self) -> Iterable[tuple[int, Chunks]]:
        """Wait for at least one reply."""


class TopicReader:
    """Long polls on one connection."""

    def __init__(self, url: str, topic: str) -> None:
        self._topic = topic
        self._polls: dict[int, int] = {}
        self._connection = _connect(url)

    def poll(self, partition: int, offset: int, wait_ms: int) -> None:
        from txmq.wire.data_requests import Opcode, Read, pack_read

        payload = pack_read(Read(partition, offset, wait_ms, READ_BYTES, self._topic))
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        correlation = self._connection.write(Opcode.READ, payload, deadline)
        self._polls[correlation] = partition

    def replies(self) -> Iterator[tuple[int, Chunks]]:
        from txmq.client.protocol.conversation import reply_payload
        from txmq.wire.chunks import unpack_chunks

        for frame in self._connection.receive(time.monotonic() + REPLY_TIMEOUT_S):
            yield self._polls.pop(frame.correlation), unpack_chunks(reply_payload(frame))

    def close(self) -> None:
        """Close the connection, and with it the polls."""
        self._connection.close()


def _connect(url: str) -> Connection:
    from txmq.client.blocking.connections.connection import open_connection
    from txmq.client.protocol.address import parse_url
    from txmq.client.protocol.conversation import Conversation, LogIdentity

    identity = LogIdentity()
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    return open_connection(
        parse_url(url), identity, lambda: Conversation(None, identity), deadline, retry=False
    )


def read_partitions(
    polls: TopicPolls, starts: Mapping[int, int], ends: Mapping[int, int] | None = None
) -> Iterator[ReceivedMessage]:
    """Yield the messages of each partition from its start, in order.

    Without `ends` it waits for more messages.
    """
    waiting = {
        number: start for number, start in starts.items() if ends is None or start < ends[number]
    }
    wait_ms = WAIT_MS if ends is None else 0
    for number, offset in waiting.items():
        polls.poll(number, offset, wait_ms)
    while waiting:
        for number, reply in polls.replies():
            for chunk in reply.chunks:
                yield from _messages(chunk, waiting[number])
            waiting[number] = max(reply.next_offset, waiting[number])
            if ends is not None and waiting[number] >= ends[number]:
                del waiting[number]
            else:
                polls.poll(number, waiting[number], wait_ms)


def _messages(chunk: Chunk, start: int) -> Iterator[ReceivedMessage]:
    """Yield the messages of a chunk. Its batch may begin before the requested
    offset.
    """
    from txmq.batch import BatchView
    from txmq.model.message import ReceivedMessage

    view = BatchView(chunk.batch)
    for row in range(max(chunk.first_row, start - chunk.base_offset), chunk.first_row + chunk.rows):
        yield ReceivedMessage(
            topic=chunk.topic,
            partition=chunk.partition,
            offset=chunk.base_offset + row,
            key=view.keys[row],
            tag=view.tags[row],
            headers=view.headers[row],
            body=view.bodies[row],
            message_id=view.message_ids[row],
            attempt=chunk.attempt,
            born_at=view.born_at[row],
            stored_at=chunk.stored_at,
        )


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
