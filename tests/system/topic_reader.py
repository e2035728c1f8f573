"""Readers of topics: of a whole one at the end, or of one as it grows, over all
outages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tests.system.send_history import TopicRow
from txmq import ReceivedMessage, connect
from txmq.cli.commands.tail import read_topic as read_partitions
from txmq.client.blocking.client import Client
from txmq.errors import BrokerUnavailable, ConnectionLost, RequestTimeout

BROKER_AWAY = (BrokerUnavailable, ConnectionLost, RequestTimeout)


def read_topic(client: Client, topic: str) -> list[ReceivedMessage]:
    """Return every message that is published now."""
    ends = dict(enumerate(client.call("topic.show", name=topic)["ends"]))
    return list(read_partitions(client, topic, dict.fromkeys(ends, 0), ends))


def topic_rows(messages: list[ReceivedMessage]) -> list[TopicRow]:
    return [topic_row(message) for message in messages]


def topic_row(message: ReceivedMessage) -> TopicRow:
    return TopicRow(message.partition, message.offset, message.key, message.body.decode())


@contextmanager
def observing(url: str, topic: str, observe: Callable[[TopicRow], None]) -> Iterator[None]:
    """Run a reader for the block, in a thread. It observes each message once, soon
    after its publication.
    """
    stop = Event()
    thread = Thread(target=_observe, args=(url, topic, observe, stop), name="reader")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _observe(url: str, topic: str, observe: Callable[[TopicRow], None], stop: Event) -> None:
    starts: dict[int, int] = {}
    with connect(url) as client:
        while not stop.wait(0.02):
            try:
                ends = dict(enumerate(client.call("topic.show", name=topic)["ends"]))
                begin = {part: starts.get(part, 0) for part in ends}
                for message in read_partitions(client, topic, begin, ends):
                    observe(topic_row(message))
                    starts[message.partition] = message.offset + 1
            except BROKER_AWAY:
                continue
