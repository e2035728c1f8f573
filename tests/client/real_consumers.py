"""Consumers of a real broker, and requests about their groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import txmq
from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.errors import TxmqError
from txmq.model.message import ReceivedMessage
from txmq.testing.wait import PATIENCE_S

# Idle for so long is a consumer that nothing comes to any more. A machine that is busy,
# or stopped for a moment, stands still for less.
IDLE_S = 4.0


@contextmanager
def closing_broker(directory: Path) -> Iterator[RealBroker]:
    broker = RealBroker(directory)
    try:
        yield broker
    finally:
        broker.stop()


@contextmanager
def busy_log(url: str) -> Iterator[None]:
    """Have other clients keep the broker's disk busy, so that refusals wait for it."""
    over = threading.Event()

    def send() -> None:
        with txmq.connect(url, timeout=PATIENCE_S) as client:
            while not over.is_set():
                with suppress(TxmqError):  # the test may keep the broker away for long
                    client.send("noise", bytes(1_000))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def receive(consumer: Consumer, count: int) -> list[ReceivedMessage]:
    """Receive and ack so many messages."""
    received: list[ReceivedMessage] = []
    for _ in range(count):
        message = consumer.receive(PATIENCE_S)
        assert message is not None, f"{len(received)} of {count} messages came"
        consumer.ack(message)
        received.append(message)
    return received


def shown(client: Client, group: str) -> dict[str, Any]:
    return client.call("group.show", group=group)


def floors(client: Client, group: str) -> int:
    return sum(position["floor"] for position in shown(client, group)["positions"])


def unprocessed(client: Client, group: str) -> int:
    """Return how many messages the group has to process, and how many are dead."""
    return unprocessed_of(shown(client, group))


def unprocessed_of(group: dict[str, Any]) -> int:
    """Return the same of a group that was shown.

    Those that a member holds count among the leased ones, and perhaps in the lag, too.
    """
    names = ("lag", "leased", "retrying", "parked", "at_consumers", "letters")
    return sum(int(group[name]) for name in names)
