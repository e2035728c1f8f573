"""Transactions on a reactor whose topics have grown, or refuse a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg2
import pytest
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import Found, RealBroker
from tests.client.scripted_member import fresh
from txmq.client.protocol.sender.rows import PART_ROWS
from txmq.errors import MessageTooLarge
from txmq.model.keys import partition_of
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.twisted import Client

FEW, GROWN = 2, 7
COUNT = 2 * PART_ROWS


@pytest.fixture
def client(reactor: Any, deciding: RealBroker, in_reactor: InReactor) -> Iterator[Client]:
    client = txmq.twisted.connect(reactor, deciding.url, service="tests", timeout=PATIENCE_S)
    yield client

    async def close() -> None:
        await client.close()

    in_reactor(close)


async def grown_topics(client: Client) -> tuple[str, ...]:
    """Return topics that have grown since the client looked them up."""
    topics = tuple(fresh(name) for name in "ab")
    for topic in topics:
        await client.call("topic.create", name=topic, partitions=FEW)
        await client.send(topic, b"before", key="k0")
        await client.call("topic.grow", name=topic, partitions=GROWN)
    return topics


def send(tx: Any, topics: tuple[str, ...], count: int) -> None:
    for topic in topics:
        for n in range(count):
            tx.send(topic, b"%d" % n, key=f"k{n % 30}")


def require_published(broker: RealBroker, topics: tuple[str, ...], count: int) -> None:
    for topic in topics:
        found: list[Found] = []

        def complete(topic: str = topic, found: list[Found] = found) -> bool:
            found[:] = [one for one in broker.read(topic) if one.body != b"before"]
            return len(found) >= count

        # a large bundle is published piece by piece, after its decision
        wait_until(complete, what=f"{count} messages in {topic}")
        assert sorted(int(one.body) for one in found) == list(range(count))
        assert all(one.partition == partition_of(one.key or "", GROWN) for one in found)
        assert len({one.message_id for one in found}) == count


@pytest.mark.parametrize("count", [10, COUNT])
def test_a_local_transaction_on_a_reactor_goes_on_by_itself(
    client: Client, deciding: RealBroker, in_reactor: InReactor, count: int
) -> None:
    async def story() -> tuple[str, ...]:
        topics = await grown_topics(client)
        async with client.transaction() as tx:
            send(tx, topics, count)
        assert {receipt.topic for receipt in await tx.receipts()} == set(topics)
        return topics

    require_published(deciding, in_reactor(story), count)


@pytest.mark.parametrize("count", [10, COUNT])
def test_a_transaction_in_threads_goes_on_by_itself(
    client: Client, deciding: RealBroker, shared_database: str, in_reactor: InReactor, count: int
) -> None:
    async def story(connection: Any) -> tuple[str, ...]:
        topics = await grown_topics(client)
        async with client.transaction(connection) as tx:
            send(tx, topics, count)
        await tx.wait_published(PATIENCE_S)
        return topics

    with closing(psycopg2.connect(shared_database)) as connection:
        topics = in_reactor(lambda: story(connection))
    require_published(deciding, topics, count)


def test_concurrent_transactions_are_not_aborted_by_a_stale_topic(
    client: Client, deciding: RealBroker, in_reactor: InReactor
) -> None:
    async def one(topics: tuple[str, ...], number: int) -> None:
        async with client.transaction() as tx:
            for topic in topics:
                tx.send(topic, b"%d" % number, key=f"k{number}")

    async def story() -> tuple[str, ...]:
        topics = await grown_topics(client)
        await gatherResults([Deferred.fromCoroutine(one(topics, n)) for n in range(60)])
        return topics

    require_published(deciding, in_reactor(story), 60)


def test_a_local_transaction_that_is_refused_frees_its_keys_at_once(
    client: Client, reactor: Any, in_reactor: InReactor
) -> None:
    async def fail(free: str, small: str) -> str:
        tx = client.transaction()
        async with tx:
            for _ in range(COUNT):
                tx.send(free, b"x", key="k")
            tx.send(small, bytes(100), partition=0)
        return tx.token.hex

    async def story() -> None:
        free, small = fresh("free"), fresh("small")
        await client.send(free, b"before", key="k")
        await client.call("topic.create", name=small, partitions=1)
        await client.call("topic.alter", name=small, message_bytes=10)
        with pytest.raises(MessageTooLarge):
            await fail(free, small)
        while (await client.call("tx.list", state="open"))["transactions"]:
            await deferLater(reactor, 0.01, lambda: None)
        assert (await client.send(free, b"after", key="k")).offset is not None

    in_reactor(story)
