"""`txmq tail`: the messages of a topic as they come, without a consumer group: nothing
is leased, acked or remembered.

Each partition has a long poll of its own; all are under way at once on one connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Topic, is_number
from txmq.cli.output import body_fields, clock, printable

if TYPE_CHECKING:
    from txmq.client.blocking.connections.connection import Connection
    from txmq.model.message import ReceivedMessage
    from txmq.wire.chunks import Chunk, Chunks

WAIT_MS = 20_000
READ_BYTES = 1 << 20
CONNECT_S = 10.0
SILENCE_S = 60.0  # an answer is due after WAIT_MS at the latest


def _start_of(text: str) -> str:
    if text not in ("first", "last") and not is_number(text):
        raise typer.BadParameter(f"{text!r} is neither first, last nor an offset")
    return text


From = Annotated[
    str | None,
    typer.Option(
        "--from",
        parser=_start_of,
        metavar="first|last|OFFSET",
        help="Where to begin.",
        show_default="last; first with --no-follow",
    ),
]
Partition = Annotated[
    list[int] | None, typer.Option(min=0, help="Only this one; may be given again.")
]
Count = Annotated[
    int | None, typer.Option("--count", "-n", min=1, help="End after so many messages.")
]
Follow = Annotated[
    bool, typer.Option(help="Wait for messages to come, or end at those that are there.")
]


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    remote(app, "tail")(tail)


def tail(
    session: Session,
    topic: Topic,
    *,
    start: From = None,
    partition: Partition = None,
    count: Count = None,
    follow: Follow = True,
) -> None:
    """Print the messages of a topic, one a line, until interrupted."""
    bounds = _bounds(session, topic, partition)
    starts = {
        number: _offset(start or ("last" if follow else "first"), *both)
        for number, both in bounds.items()
    }
    ends = {number: end for number, (_first, end) in bounds.items()}
    reader = Reader(session.url, topic)
    try:
        for message in islice(read(reader, starts, None if follow else ends), count):
            session.out.line(fields_of(message), text_of(message))
    except KeyboardInterrupt:  # the way to end it
        return
    finally:
        reader.close()


def _bounds(
    session: Session, topic: str, partitions: list[int] | None
) -> dict[int, tuple[int, int]]:
    """The offsets of the first message kept and after the last one, of each partition
    to read.
    """
    shown = session.client.call("topic.show", name=topic)
    bounds = dict(enumerate(zip(shown["firsts"], shown["ends"], strict=True)))
    missing = [number for number in partitions or () if number not in bounds]
    if missing:
        raise typer.BadParameter(
            f"topic {topic} has no partition {missing[0]}: they are 0 to {len(bounds) - 1}"
        )
    return {number: bounds[number] for number in partitions} if partitions else bounds


def _offset(start: str, first: int, end: int) -> int:
    return (
        {"first": first, "last": end}[start]
        if start in ("first", "last")
        else min(max(int(start), first), end)
    )


class Polls(Protocol):
    """Long polls of partitions."""

    def ask(self, partition: int, offset: int, wait_ms: int) -> None:
        """Begin one."""

    def answers(self) -> Iterable[tuple[int, Chunks]]:
        """Wait until at least one is answered."""


class Reader:
    """Long polls on one connection."""

    def __init__(self, url: str, topic: str) -> None:
        self._topic = topic
        self._asked: dict[int, int] = {}
        self._connection = _dial(url)

    def ask(self, partition: int, offset: int, wait_ms: int) -> None:
        from txmq.wire.headers import Opcode, Read, pack_read

        payload = pack_read(Read(partition, offset, wait_ms, READ_BYTES, self._topic))
        self._asked[self._connection.write(Opcode.READ, payload, time.monotonic() + SILENCE_S)] = (
            partition
        )

    def answers(self) -> Iterator[tuple[int, Chunks]]:
        from txmq.client.protocol.conversation import result
        from txmq.wire.chunks import unpack_chunks

        for frame in self._connection.receive(time.monotonic() + SILENCE_S):
            yield self._asked.pop(frame.correlation), unpack_chunks(result(frame))

    def close(self) -> None:
        """End the polls."""
        self._connection.close()


def _dial(url: str) -> Connection:
    from txmq.client.blocking.connections.connection import dial
    from txmq.client.protocol.address import parse_url
    from txmq.client.protocol.conversation import Conversation, LogPin

    pin = LogPin()
    return dial(
        parse_url(url), lambda: Conversation(None, pin), time.monotonic() + CONNECT_S, patient=False
    )


def read(
    polls: Polls, starts: Mapping[int, int], ends: Mapping[int, int] | None = None
) -> Iterator[ReceivedMessage]:
    """The messages of each partition from its start on, in their order; up to `ends`,
    or without end.
    """
    waiting = {
        number: start for number, start in starts.items() if ends is None or start < ends[number]
    }
    wait_ms = WAIT_MS if ends is None else 0
    for number, offset in waiting.items():
        polls.ask(number, offset, wait_ms)
    while waiting:
        for number, found in polls.answers():
            for chunk in found.chunks:
                yield from _messages(chunk, waiting[number])
            waiting[number] = max(found.next_offset, waiting[number])
            if ends is not None and waiting[number] >= ends[number]:
                del waiting[number]
            else:
                polls.ask(number, waiting[number], wait_ms)


def _messages(chunk: Chunk, start: int) -> Iterator[ReceivedMessage]:
    """The messages of a chunk; its batch may begin before the offset that was asked
    for.
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


def fields_of(message: ReceivedMessage) -> dict[str, Any]:
    """A message as JSON has it."""
    fields = message._asdict() | {"headers": dict(message.headers)}
    del fields["body"], fields["attempt"]
    return fields | body_fields(message.body)


def text_of(message: ReceivedMessage) -> str:
    """A message as people read it."""
    words = [clock(message.stored_at), f"{message.topic}/{message.partition}/{message.offset}"]
    marks = {"key": message.key, "tag": message.tag} | dict(message.headers)
    words += [printable(f"{name}={value}") for name, value in marks.items() if value is not None]
    ((_, body),) = body_fields(message.body).items()
    return " ".join([*words, printable(body)])
