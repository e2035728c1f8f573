"""A cluster on asyncio: as the others, and one loop waits for all brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

import txmq.aio
from tests.client.aio.databases import DATABASES, Database
from tests.client.aio.running import WAIT_S, run
from tests.client.kept_sessions import asked
from tests.client.real import RealBroker, bodies
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, make_tables
from txmq.aio import Cluster, Consumers
from txmq.client.protocol.offsets import FileOffsets
from txmq.errors import LocalProtocolError
from txmq.model.message import Message, ReceivedMessage
from txmq.testing.ports import free_port

KEYS = [f"k{number}" for number in range(12)]


@asynccontextmanager
async def clustered(
    *brokers: RealBroker, partitions: int = 2
) -> AsyncIterator[tuple[Cluster, str]]:
    """A cluster of the brokers, and a topic that each of them has."""
    urls = [broker.url for broker in brokers]
    async with txmq.aio.connect(urls, service="tests", timeout=WAIT_S) as cluster:
        topic = fresh("t")
        for client in cluster.clients:
            await client.call("topic.create", name=topic, partitions=partitions)
        yield cluster, topic


async def drained(consumers: Consumers, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    while len(found) < count:
        message = await consumers.receive(WAIT_S)
        assert message is not None, f"{len(found)} of {count} came"
        await consumers.ack(message, wait=True)
        found.append(message)
    return found


def test_messages_go_to_the_brokers_of_their_keys_and_come_from_all(
    deciding: RealBroker, also_deciding: RealBroker, tmp_path: Path
) -> None:
    async def story() -> None:
        async with clustered(deciding, also_deciding) as (cluster, topic):
            await cluster.send(topic, b"one", key="k1")
            await (await cluster.send_async(topic, b"later", key="k1"))
            batch = await cluster.send_batch(topic, [Message(b"b", key=key) for key in KEYS])
            assert len(batch) == len(KEYS)
            await cluster.send_many(topic, [b"c"] * len(KEYS), KEYS)
            cluster.send_one_way(topic, b"one way", key="k2")
            every = 3 + 2 * len(KEYS)
            async with await cluster.consumer(fresh("g"), [topic]) as consumers:
                found = await drained(consumers, every)
            homes = {key: (await cluster._route(topic, key, None)).broker for key in KEYS}
            assert set(homes.values()) == {0, 1}
            assert next(message.body for message in found if message.key == "k1") == b"one"
            async with await cluster.reader("r", [topic], FileOffsets(tmp_path)) as readers:
                read = [await readers.receive(WAIT_S) for _ in range(every)]
                assert None not in read
                with pytest.raises(LocalProtocolError):
                    readers.assign(None)
            async with cluster.transaction() as tx:
                tx.send(topic, b"decided by one", key="k1")
            by_key = {home: key for key, home in homes.items()}
            with pytest.raises(LocalProtocolError):  # noqa: PT012
                async with cluster.transaction() as tx:
                    for key in by_key.values():
                        tx.send(topic, b"of two", key=key)

    run(story())


def test_without_one_broker_messages_without_a_key_go_to_the_other(
    deciding: RealBroker,
) -> None:
    async def story() -> None:
        urls = [f"txmq://127.0.0.1:{free_port()}", deciding.url]
        async with txmq.aio.connect(urls, timeout=4.0) as cluster:
            topic = fresh("t")
            receipts = await asyncio.gather(*(cluster.send(topic, b"x") for _ in range(4)))
            assert len({receipt.message_id for receipt in receipts}) == 4

    run(story())


@pytest.mark.parametrize("database", DATABASES.values(), ids=list(DATABASES))
def test_one_commit_decides_for_all_brokers(
    database: Database, shared_database: str, deciding: RealBroker, also_deciding: RealBroker
) -> None:
    make_tables(shared_database)

    async def story() -> None:
        async with clustered(deciding, also_deciding) as (cluster, topic):
            connection = await database.connect(shared_database)
            try:
                for order, fails in (("o-1", False), ("o-2", True), ("o-3", False)):
                    with suppress(ApplicationError):
                        async with cluster.transaction(connection) as tx:
                            await database.execute(
                                connection, f"INSERT INTO orders (id) VALUES ('{order}')"
                            )
                            for key in KEYS:
                                tx.send(topic, order.encode(), key=key)
                            if fails:
                                raise ApplicationError
                    if not fails:
                        await tx.wait_published()
                        assert len(await tx.receipts()) == len(KEYS)
            finally:
                await database.close(connection)
            stored = [bodies(broker, topic) for broker in (deciding, also_deciding)]
            assert all(stored)
            assert sorted(body for one in stored for body in one) == sorted(
                [b"o-1", b"o-3"] * len(KEYS)
            )
        assert set(asked(shared_database, "SELECT id FROM orders")) == {("o-1",), ("o-3",)}

    run(story())
