"""Consumers of a real broker, and requests about their groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.model.message import ReceivedMessage

WAIT_S = 20.0


@contextmanager
def closing_broker(directory: Path) -> Iterator[RealBroker]:
    broker = RealBroker(directory)
    try:
        yield broker
    finally:
        broker.stop()


def receive(consumer: Consumer, count: int) -> list[ReceivedMessage]:
    """Receive and ack so many messages."""
    received: list[ReceivedMessage] = []
    for _ in range(count):
        message = consumer.receive(WAIT_S)
        assert message is not None, f"{len(received)} of {count} messages came"
        consumer.ack(message)
        received.append(message)
    return received


def shown(client: Client, group: str) -> dict[str, Any]:
    return client.call("group.show", group=group)


def floors(client: Client, group: str) -> int:
    return sum(position["floor"] for position in shown(client, group)["positions"])
