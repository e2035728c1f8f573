"""Failed messages in the local store of a consumer on Twisted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

import txmq.twisted
from tests.client.effects import effects, take_effect, with_effects
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.errors import DirectoryInUse
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.twisted import Client
from txmq.tx.postgres.session import Connection

WAIT_S = 20.0
IDLE_S = 2.0  # much longer than a busy machine stands still
BODIES = [f"m{number:02}" for number in range(6)]


@pytest.fixture
def client(reactor: Any, in_reactor: InReactor, shared_broker: RealBroker) -> Iterator[Client]:
    yield from closed_client(reactor, in_reactor, shared_broker)


def closed_client(reactor: Any, in_reactor: InReactor, broker: RealBroker) -> Iterator[Client]:
    client = txmq.twisted.connect(reactor, broker.url, service="tests", timeout=WAIT_S)
    yield client

    async def close() -> None:
        await client.close()

    in_reactor(close)


async def consumer_of(client: Any, directory: Path, **options: Any) -> Any:
    topic, group = fresh("t"), fresh("g")
    await client.send_batch(
        topic, [Message(body.encode(), f"k{n % 2}") for n, body in enumerate(BODIES)]
    )
    settings = {"on_failure": "local", "local_store": directory}
    retry = RetryPolicy.table(0.3, attempts=5)
    return await client.consumer(group, [topic], **{**settings, "retry": retry, **options})


def fail_once(message: ReceivedMessage) -> None:
    if message.attempt == 1:
        raise KeyError("k")


def test_failed_messages_are_retried_here_and_settled_at_the_broker(
    client: Client, in_reactor: InReactor, tmp_path: Path
) -> None:
    async def story() -> None:
        consumer = await consumer_of(client, tmp_path, mode="ordered")
        await consumer.run(fail_once, workers=3, idle_exit=IDLE_S)
        stats = consumer.stats
        assert (stats.nacked, stats.acked, stats.stored) == (6, 6, 0)
        await consumer.close()
        shown = await client.call("group.show", group=consumer.group)
        assert (shown["lag"], shown["retrying"], shown["at_consumers"]) == (0, 0, 0)

    in_reactor(story)


def test_each_message_takes_effect_once_with_an_inbox(
    client: Client, in_reactor: InReactor, tmp_path: Path, database: str
) -> None:
    connect: Callable[[], Connection] = with_effects(database)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        fail_once(message)

    async def story() -> None:
        consumer = await consumer_of(client, tmp_path)
        await consumer.run(handle, inbox=connect, workers=2, idle_exit=IDLE_S)
        assert (consumer.stats.stored, consumer.stats.acked) == (0, 6)
        await consumer.close()

    in_reactor(story)
    assert effects(connect) == BODIES


def test_effects_come_while_the_broker_is_away_and_acks_follow(
    reactor: Any, in_reactor: InReactor, own_broker: RealBroker, tmp_path: Path
) -> None:
    attempts: list[int] = []
    done: Deferred[None] = Deferred()

    async def story(client: Any) -> None:
        async def handle(message: ReceivedMessage) -> None:
            attempts.append(message.attempt)
            if message.attempt == 1:
                await client.send("other", b"after the lease, which is durable then")
                own_broker.kill()
                raise KeyError("k")
            done.callback(None)

        await client.send("t", b"m00")
        consumer = await client.consumer(
            "g", ["t"], local_store=tmp_path / "s", retry=RetryPolicy.table(0.3, attempts=5)
        )
        run = consumer.run(handle)
        await done
        assert consumer.stats.stored == 1
        own_broker.start()
        while (await client.call("group.show", group="g"))["lag"]:
            await deferLater(reactor, 0.02)
        assert (consumer.stats.stored, consumer.stats.rejoined > 0) == (0, True)
        await consumer.close()
        await run

    for client in closed_client(reactor, in_reactor, own_broker):
        in_reactor(partial(story, client))
    assert attempts == [1, 2]


def test_a_second_consumer_is_told_that_the_directory_is_in_use(
    client: Any, in_reactor: InReactor, tmp_path: Path
) -> None:
    async def story() -> None:
        consumer = await consumer_of(client, tmp_path)
        with pytest.raises(DirectoryInUse):
            await client.consumer(
                consumer.group,
                consumer.settings.topics,
                local_store=tmp_path,
                retry=consumer.settings.retry,
            )
        await consumer.close()

    in_reactor(story)
