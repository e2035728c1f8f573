"""Topics read back: all of one at the end, or as it grows, over any number of
outages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread

from tests.system.history import Row
from txmq import ReceivedMessage, connect
from txmq.cli.commands.tail import Reader, read
from txmq.client import Client
from txmq.errors import BrokerUnavailable, ConnectionLost, RequestTimeout

AWAY = (BrokerUnavailable, ConnectionLost, RequestTimeout)


def whole_topic(client: Client, url: str, topic: str) -> list[ReceivedMessage]:
    """Every message that is published now."""
    ends = dict(enumerate(client.call("topic.show", name=topic)["ends"]))
    return list(_span(url, topic, dict.fromkeys(ends, 0), ends))


def rows(messages: list[ReceivedMessage]) -> list[Row]:
    return [row(message) for message in messages]


def row(message: ReceivedMessage) -> Row:
    return Row(message.partition, message.offset, message.key, message.body.decode())


def _span(
    url: str, topic: str, starts: dict[int, int], ends: dict[int, int]
) -> Iterator[ReceivedMessage]:
    with closing(Reader(url, topic)) as reader:
        yield from read(reader, starts, ends)


@contextmanager
def watched(url: str, topic: str, see: Callable[[Row], None]) -> Iterator[None]:
    """For the block, a reader in a thread of its own sees each message once, soon after
    it is published.
    """
    stop = Event()
    thread = Thread(target=_watch, args=(url, topic, see, stop), name="reader")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(url: str, topic: str, see: Callable[[Row], None], stop: Event) -> None:
    starts: dict[int, int] = {}
    with connect(url) as client:
        while not stop.wait(0.02):
            try:
                ends = dict(enumerate(client.call("topic.show", name=topic)["ends"]))
                for message in _span(
                    url, topic, {part: starts.get(part, 0) for part in ends}, ends
                ):
                    see(row(message))
                    starts[message.partition] = message.offset + 1
            except AWAY:
                continue
