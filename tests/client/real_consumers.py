"""Consumers of a real broker, and requests about their groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import txmq
from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.consumer import BlockingConsumer, Consumer
from txmq.errors import TxmqError
from txmq.model.message import ReceivedMessage
from txmq.testing.wait import PATIENCE_S, wait_until

TO_COME = ("unsettled", "leased", "retrying", "at_consumers")  # counts of a group


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


def run_until(
    consumer: BlockingConsumer,
    handler: Callable[..., Any],
    done: Callable[[], object],
    **options: Any,
) -> None:
    """Run the handler until `done`, which another thread calls, returns a true value.
    Raises what either raises.
    """
    stop, over = threading.Event(), threading.Event()

    def watch() -> None:
        try:
            wait_until(lambda: over.is_set() or done())
        finally:
            stop.set()

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(watch)
        try:
            consumer.run(handler, stop=stop, **options)
        finally:
            over.set()
        watching.result()


def drain(
    client: Client,
    consumer: Consumer,
    handler: Callable[..., object],
    until: Callable[[], object] = lambda: True,
    **options: Any,
) -> None:
    """Run the handler until `until` returns a true value, the group has nothing more to
    deliver, and the consumer knows it: a nack counts in its stats once it is answered.
    """

    def done() -> object:
        return until() and is_drained(shown(client, consumer.group)) and is_answered(consumer)

    run_until(consumer, handler, done, **options)


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
    return sum(int(group[name]) for name in (*TO_COME, "parked", "letters"))


def is_answered(consumer: Consumer) -> bool:
    """Return whether the brokers have answered all that the consumer has settled."""
    return all(one.member.settlement.idle for one in consumer._members.members)


def is_drained(group: dict[str, Any]) -> bool:
    """Return whether the group that was shown has nothing more to deliver: each message
    is processed, dead, or parked behind a dead one.
    """
    return not any(group[name] for name in TO_COME)
