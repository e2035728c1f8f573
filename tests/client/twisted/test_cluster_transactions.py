"""Transactions over a cluster on Twisted: each message and ack goes to its broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg2
import pytest

import txmq.twisted
from tests.client.reactor_thread import WAIT_S, InReactor
from tests.client.real import RealBroker, bodies
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, fail, make_tables
from txmq.errors import BrokerUnavailable, LocalProtocolError
from txmq.model.message import ReceivedMessage
from txmq.testing.ports import free_port
from txmq.testing.postgres_server import PostgresServer
from txmq.twisted import Cluster

KEYS = [f"k{number}" for number in range(12)]


class TwistedClusterShop:
    """A database with orders, two brokers that may ask it, and their cluster."""

    def __init__(self, dsn: str, brokers: tuple[RealBroker, ...], cluster: Cluster) -> None:
        self.dsn, self.brokers, self.cluster = dsn, brokers, cluster
        self.connection = psycopg2.connect(dsn)
        self.topic = fresh("t")

    async def make(self) -> None:
        for client in self.cluster.clients:
            await client.call("topic.create", name=self.topic, partitions=2)

    def insert(self, order: str, connection: Any = None) -> None:
        with (connection or self.connection).cursor() as cursor:
            cursor.execute("INSERT INTO orders (id) VALUES (%s)", (order,))

    def orders(self) -> set[str]:
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id FROM orders")
            return {order for (order,) in cursor.fetchall()}

    def stored(self) -> list[set[str]]:
        return [{body.decode() for body in bodies(broker, self.topic)} for broker in self.brokers]

    async def keys_of(self, broker: int) -> list[str]:
        return [
            key
            for key in KEYS
            if (await self.cluster._route(self.topic, key, None)).broker == broker
        ]


@pytest.fixture
def shop(
    reactor: Any,
    in_reactor: InReactor,
    shared_database: str,
    deciding: RealBroker,
    also_deciding: RealBroker,
) -> Iterator[TwistedClusterShop]:
    make_tables(shared_database)
    brokers = (deciding, also_deciding)
    cluster = txmq.twisted.connect(
        reactor, [broker.url for broker in brokers], service="orders", timeout=WAIT_S
    )
    shop = TwistedClusterShop(shared_database, brokers, cluster)
    in_reactor(shop.make)
    yield shop
    shop.connection.close()

    async def close() -> None:
        await cluster.close()

    in_reactor(close)


def test_rows_and_the_messages_of_all_keys_exist_together(
    shop: TwistedClusterShop, in_reactor: InReactor
) -> None:
    async def story() -> None:
        async with shop.cluster.transaction(shop.connection) as tx:
            await tx.run(shop.insert, "o-1")
            for key in KEYS:
                tx.send(shop.topic, key.encode(), key=key)
            tx.send_many(shop.topic, [b"any"])
        await tx.wait_published()
        plain = [await shop.cluster.send(shop.topic, b"", key=key) for key in KEYS]
        receipts = await tx.run(tx.receipts)
        assert [got.partition for got in plain] == [got.partition for got in receipts[:-1]]
        for broker in range(2):
            assert set(await shop.keys_of(broker)) <= shop.stored()[broker]
        assert shop.orders() == {"o-1"}

    in_reactor(story)


async def place(shop: TwistedClusterShop, cluster: Cluster, order: str, **fields: Any) -> None:
    """Insert an order, and send a message."""
    async with cluster.transaction(shop.connection) as tx:
        await tx.run(shop.insert, order)
        tx.send(shop.topic, b"", **fields)


def test_a_block_that_raises_leaves_nothing_anywhere(
    shop: TwistedClusterShop, in_reactor: InReactor
) -> None:
    async def story() -> None:
        with suppress(ApplicationError):
            async with shop.cluster.transaction(shop.connection) as tx:
                await tx.run(shop.insert, "o-1")
                tx.send(shop.topic, b"", key="k0")
                fail()
        with pytest.raises(LocalProtocolError, match="0 to 3"):
            await place(shop, shop.cluster, "o-2", partition=4)
        assert (shop.orders(), shop.stored()) == (set(), [set(), set()])

    in_reactor(story)


def test_without_a_broker_for_the_lookup_the_rows_are_rolled_back(
    shop: TwistedClusterShop, reactor: Any, in_reactor: InReactor
) -> None:
    async def story() -> None:
        urls = [shop.brokers[0].url, f"txmq://127.0.0.1:{free_port()}"]
        async with txmq.twisted.connect(reactor, urls, service="orders", timeout=0.5) as cluster:
            with pytest.raises(BrokerUnavailable):
                await place(shop, cluster, "o-1", key="k0")
        async with shop.cluster.transaction(shop.connection) as tx:
            await tx.run(shop.insert, "o-2")
        assert shop.orders() == {"o-2"}

    in_reactor(story)


def test_messages_are_acked_at_the_brokers_that_delivered_them(
    shop: TwistedClusterShop, in_reactor: InReactor
) -> None:
    async def story() -> None:
        for key in KEYS:
            await shop.cluster.send(shop.topic, key.encode(), key=key)
        answers = fresh("answers")
        async with await shop.cluster.consumer(fresh("g"), [shop.topic]) as consumer:
            async with shop.cluster.transaction(shop.connection) as tx:
                for _ in KEYS:
                    message: ReceivedMessage | None = await consumer.receive(WAIT_S)
                    assert message is not None
                    tx.ack(message)
                    tx.send(answers, message.body, key=message.key)
            await tx.wait_published()
        found = {one.body.decode() async for one in shop.cluster.find(answers)}
        assert found == set(KEYS)

    in_reactor(story)


def test_the_broker_alone_decides_what_belongs_to_it(
    shop: TwistedClusterShop, in_reactor: InReactor
) -> None:
    async def story() -> None:
        here, there = await shop.keys_of(0), await shop.keys_of(1)
        async with shop.cluster.transaction() as tx:
            tx.send(shop.topic, b"any")
            tx.send(shop.topic, b"key", key=there[0])
        assert len(tx.receipts) == 2
        assert shop.stored() == [set(), {"any", "key"}]
        tx = shop.cluster.transaction()
        await tx.__aenter__()
        tx.send(shop.topic, b"here", key=here[0])
        tx.send(shop.topic, b"there", key=there[0])
        with pytest.raises(LocalProtocolError, match="second broker"):
            await tx.__aexit__(None, None, None)
        async with shop.cluster.transaction() as tx:
            tx.send(shop.topic, b"only any")
        assert sum("only any" in stored for stored in shop.stored()) == 1

    in_reactor(story)


def test_an_ack_names_the_broker_that_decides_alone(
    shop: TwistedClusterShop, in_reactor: InReactor
) -> None:
    async def story() -> None:
        here, there = [(await shop.keys_of(broker))[0] for broker in range(2)]
        answers = fresh("answers")
        for key in (here, there):
            await shop.cluster.send(shop.topic, key.encode(), key=key)
        async with await shop.cluster.consumer(fresh("g"), [shop.topic]) as consumer:
            messages = [await consumer.receive(WAIT_S) for _ in range(2)]
            with suppress(ApplicationError):
                async with shop.cluster.transaction() as tx:
                    tx.ack(messages[0])
                    with pytest.raises(LocalProtocolError, match="second broker"):
                        tx.ack(messages[1])
                    fail()
            for message in messages:
                assert message is not None
                async with shop.cluster.transaction() as tx:
                    tx.ack(message)
                    tx.send(answers, message.body)
        found = {one.body.decode() async for one in shop.cluster.find(answers)}
        assert found == {here, there}

    in_reactor(story)


def test_a_checker_decides_what_belongs_to_its_broker(
    shop: TwistedClusterShop, in_reactor: InReactor
) -> None:
    async def story() -> None:
        key = (await shop.keys_of(1))[0]
        async with shop.cluster.transaction(checker="payments") as tx:
            tx.send(shop.topic, b"paid", key=key)
            tx.send(shop.topic, b"any")
            await tx.prepare()
            assert shop.stored() == [set(), set()]
        await tx.wait_published()
        half = await shop.cluster.half(shop.topic, b"half", key=key, checker="payments")
        await half.commit()
        assert shop.stored() == [set(), {"paid", "any", "half"}]

    in_reactor(story)


def test_rows_of_two_databases_and_messages_of_two_brokers_exist_together(
    shop: TwistedClusterShop, in_reactor: InReactor, postgres: PostgresServer
) -> None:
    other = postgres.create_database()
    make_tables(postgres.dsn(other))
    with closing(psycopg2.connect(postgres.dsn(other))) as connection:

        async def story() -> None:
            async with shop.cluster.xa(shop.connection, connection) as tx:
                await tx.run(shop.insert, "o-1")
                await tx.run(shop.insert, "o-1", connection)
                for key in KEYS:
                    tx.send(shop.topic, key.encode(), key=key)
            await tx.wait_published()
            assert tx.unfinished == ()
            assert shop.orders() == {"o-1"}
            assert set.union(*shop.stored()) == set(KEYS)
            assert all(shop.stored())

        in_reactor(story)
    postgres.drop_database(other)
