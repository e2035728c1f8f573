"""Attempts in place on Twisted: handlers that are coroutines, and those with an
inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater

import txmq.twisted
from tests.client.effects import effects, take_effect, with_effects
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.model.message import ReceivedMessage
from txmq.twisted import Client
from txmq.tx.postgres.session import Connection

WAIT_S = 20.0
IDLE_S = 2.0  # much longer than a busy machine stands still


@pytest.fixture
def client(reactor: Any, in_reactor: InReactor, shared_broker: RealBroker) -> Iterator[Client]:
    client = txmq.twisted.connect(reactor, shared_broker.url, service="tests", timeout=WAIT_S)
    yield client

    async def close() -> None:
        await client.close()

    in_reactor(close)


async def consumer_of_one(client: Any, **options: Any) -> Any:
    topic = fresh("t")
    await client.send(topic, b"m00", key="key")
    return await client.consumer(fresh("g"), [topic], **options)


def test_a_coroutine_is_called_again_in_place(client: Client, in_reactor: InReactor) -> None:
    attempts: list[int] = []

    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        if len(attempts) < 3:
            raise KeyError("k")

    async def story() -> None:
        consumer = await consumer_of_one(client, attempts_in_place=3)
        await consumer.run(handle, idle_exit=IDLE_S)
        stats = consumer.stats
        assert (stats.retried, stats.nacked, stats.acked) == (2, 0, 1)

    in_reactor(story)
    assert attempts == [1, 1, 1]


def test_a_cancelled_run_ends_them(client: Client, reactor: Any, in_reactor: InReactor) -> None:
    def handle(_message: ReceivedMessage) -> None:
        raise KeyError("k")

    async def story() -> None:
        consumer = await consumer_of_one(client, attempts_in_place=1_000)
        run = consumer.run(handle)
        while not consumer.stats.retried:
            await deferLater(reactor, 0.01)
        run.cancel()
        with pytest.raises(CancelledError):
            await run
        await consumer.close()
        assert (consumer.stats.nacked, consumer.stats.postponed) == (0, 1)

    in_reactor(story)


def test_each_attempt_has_a_transaction_of_its_own_with_an_inbox(
    client: Client, in_reactor: InReactor, database: str
) -> None:
    connect: Callable[[], Connection] = with_effects(database)
    attempts: list[int] = []

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        attempts.append(message.attempt)
        if len(attempts) < 3:
            raise KeyError("k")

    async def story() -> None:
        consumer = await consumer_of_one(client, attempts_in_place=3)
        await consumer.run(handle, inbox=connect, idle_exit=IDLE_S)
        assert (consumer.stats.retried, consumer.stats.nacked) == (2, 0)

    in_reactor(story)
    assert attempts == [1, 1, 1]
    assert effects(connect) == ["m00"]
