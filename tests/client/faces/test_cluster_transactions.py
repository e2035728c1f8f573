"""Transactions over a cluster: each message and ack goes to its broker, by itself."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest

from tests.client.faces.face import Face, given
from tests.client.kept_sessions import asked
from tests.client.proxy import Proxy
from tests.client.real import RealBroker, bodies
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, fail, make_tables
from txmq.client.protocol.transaction.open_work import end_work
from txmq.errors import (
    BrokerUnavailable,
    LocalProtocolError,
    TransactionAborted,
    TxmqError,
)
from txmq.model.keys import partition_of
from txmq.model.message import COMMIT
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import PATIENCE_S

KEYS = [f"k{number}" for number in range(12)]
HERE = [key for key in KEYS if partition_of(key, 4) < 2]
THERE = [key for key in KEYS if partition_of(key, 4) >= 2]
NOBODY = "txmq://127.0.0.1:1"
OpenShop = Callable[[], Awaitable["Shop"]]


class Shop:
    """A database with orders, two brokers that may ask it, and their cluster."""

    def __init__(
        self, face: Face, dsn: str, brokers: tuple[RealBroker, ...], connection: Any
    ) -> None:
        self.face, self.dsn, self.brokers, self.connection = face, dsn, brokers, connection
        self.cluster = face.connect([broker.url for broker in brokers], service="orders")
        self.topic = fresh("t")

    async def insert(self, order: str, connection: Any = None) -> None:
        statement = "INSERT INTO orders (id) VALUES (%s)"
        await self.face.execute(connection or self.connection, statement, (order,))

    async def place(self, cluster: Any, order: str, **fields: Any) -> None:
        """Insert an order and send a message in a transaction."""
        async with cluster.transaction(self.connection) as tx:
            await self.insert(order)
            tx.send(self.topic, b"", **fields)

    def orders(self) -> set[str]:
        return {order for (order,) in asked(self.dsn, "SELECT id FROM orders")}

    def stored(self) -> list[set[str]]:
        """The bodies of the published messages at each broker."""
        return [{body.decode() for body in bodies(broker, self.topic)} for broker in self.brokers]

    async def settled(self) -> bool:
        listed = [
            await client.call("tx.list", state="undecided") for client in self.cluster.clients
        ]
        return not any(each["transactions"] for each in listed)

    def token_rows(self, token: UUID) -> int:
        return len(asked(self.dsn, f"SELECT 1 FROM txmq_token WHERE tok = '{token}'"))


@pytest.fixture
def open_shop(
    face: Face, shared_database: str, deciding: RealBroker, also_deciding: RealBroker
) -> OpenShop:
    make_tables(shared_database)

    async def opened() -> Shop:
        connection = await face.database(shared_database)
        shop = Shop(face, shared_database, (deciding, also_deciding), connection)
        for client in shop.cluster.clients:
            await client.call("topic.create", name=shop.topic, partitions=2)
        return shop

    return opened


async def test_rows_and_the_messages_of_all_keys_exist_together(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    async with shop.cluster.transaction(shop.connection) as tx:
        await shop.insert("o-1")
        for key in KEYS:
            tx.send(shop.topic, key.encode(), key=key)
        tx.send_many(shop.topic, [key.encode() for key in KEYS], KEYS)
        assert shop.stored() == [set(), set()]
    await tx.wait_published(PATIENCE_S)
    assert shop.orders() == {"o-1"}
    assert shop.stored() == [set(HERE), set(THERE)]
    assert shop.token_rows(tx.token) == 2


async def test_a_key_has_the_partition_that_plain_sends_of_it_have(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    plain = [await shop.cluster.send(shop.topic, b"plain", key=key) for key in KEYS]
    async with shop.cluster.transaction(shop.connection) as tx:
        for key in KEYS:
            tx.send(shop.topic, b"", key=key)
    await tx.wait_published(PATIENCE_S)
    receipts = await given(tx.receipts())
    assert [(got.topic, got.partition) for got in receipts] == [
        (shop.topic, got.partition) for got in plain
    ]


async def test_receipts_are_in_the_order_of_the_sends_and_find_their_messages(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    async with shop.cluster.transaction(shop.connection) as tx:
        tx.send(shop.topic, b"k0", key="k0")
        tx.send(shop.topic, b"none")
        tx.send_many(shop.topic, [b"k1", b"none", b"k2"], ["k1", None, "k2"])
        tx.send(shop.topic, b"partition", partition=3)
        tx.send(shop.topic, b"k3", key="k3")
    await tx.wait_published(PATIENCE_S)
    receipts = await given(tx.receipts())
    assert len({got.message_id for got in receipts}) == 7
    found = [
        [one async for one in shop.cluster.find(shop.topic, message_id=got)] for got in receipts
    ]
    assert [[one.body for one in each] for each in found] == [
        [b"k0"], [b"none"], [b"k1"], [b"none"], [b"k2"], [b"partition"], [b"k3"]
    ]  # fmt: skip
    assert [got.offset for got in receipts] == [each[0].offset for each in found]


async def test_messages_without_a_key_follow_those_with_one(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    async with shop.cluster.transaction(shop.connection) as tx:
        tx.send(shop.topic, b"first")
        tx.send(shop.topic, b"key", key=THERE[0])
        tx.send_many(shop.topic, [b"last"])
    await tx.wait_published(PATIENCE_S)
    assert shop.stored() == [set(), {"first", "key", "last"}]
    assert shop.token_rows(tx.token) == 1


async def test_a_named_broker_gets_its_messages_and_those_without_a_key(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    async with shop.cluster.transaction(shop.connection) as tx:
        tx.send(shop.topic, b"any")
        there = await given(tx.at(shop.cluster.clients[1]))
        there.send(shop.topic, b"named", key=HERE[0])
    await tx.wait_published(PATIENCE_S)
    assert shop.stored() == [set(), {"any", "named"}]


async def test_a_block_that_raises_leaves_nothing_anywhere(face: Face, open_shop: OpenShop) -> None:
    shop = await open_shop()
    with suppress(ApplicationError):
        async with shop.cluster.transaction(shop.connection) as tx:
            await shop.insert("o-1")
            for key in KEYS:
                tx.send(shop.topic, b"", key=key)
            fail()
    assert (shop.orders(), shop.stored()) == (set(), [set(), set()])
    with pytest.raises(TxmqError):
        tx.send(shop.topic, b"late")


async def test_a_savepoint_takes_back_the_sends_to_all_brokers(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    async with shop.cluster.transaction(shop.connection) as tx:
        await shop.insert("o-1")
        tx.send(shop.topic, b"kept", key="k0")
        with suppress(ApplicationError):
            async with tx.savepoint():
                await shop.insert("o-2")
                for key in KEYS:
                    tx.send(shop.topic, b"withdrawn", key=key)
                fail()
    await tx.wait_published(PATIENCE_S)
    assert shop.orders() == {"o-1"}
    assert set.union(*shop.stored()) == {"kept"}


async def test_a_partition_that_does_not_exist_rolls_the_rows_back(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    with pytest.raises(LocalProtocolError, match="0 to 3"):
        await shop.place(shop.cluster, "o-1", partition=4)
    assert shop.orders() == set()
    await shop.place(shop.cluster, "o-2")  # the connection is fit for others
    assert shop.orders() == {"o-2"}


async def test_messages_are_acked_at_the_brokers_that_delivered_them(
    face: Face, open_shop: OpenShop
) -> None:
    shop, answers = await open_shop(), fresh("answers")
    for key in KEYS:
        await shop.cluster.send(shop.topic, key.encode(), key=key)
    async with await shop.cluster.consumer(fresh("g"), [shop.topic]) as consumer:
        async with shop.cluster.transaction(shop.connection) as tx:
            for _ in KEYS:
                message = await consumer.receive(PATIENCE_S)
                tx.ack(message)
                tx.send(answers, message.body, key=message.key)
        await tx.wait_published(PATIENCE_S)
        await face.until(shop.settled)
    found = {one.body.decode() async for one in shop.cluster.find(answers)}
    assert found == set(KEYS)


async def test_a_message_of_another_cluster_cannot_be_acked(
    face: Face, open_shop: OpenShop, own_broker: RealBroker
) -> None:
    shop, other = await open_shop(), face.connect(own_broker.url)
    await other.send("t", b"")
    async with await other.consumer("g", ["t"]) as consumer:
        message = await consumer.receive(PATIENCE_S)
        async with shop.cluster.transaction(shop.connection) as tx:
            with pytest.raises(LocalProtocolError, match="none of the cluster's brokers"):
                tx.ack(message)


async def test_the_broker_alone_decides_what_belongs_to_it(face: Face, open_shop: OpenShop) -> None:
    shop = await open_shop()
    async with shop.cluster.transaction() as tx:
        tx.send(shop.topic, b"any")
        tx.send(shop.topic, b"key", key=THERE[0])
        tx.send(shop.topic, b"other key", key=THERE[1])
    await face.until(lambda: shop.stored() == [set(), {"any", "key", "other key"}])
    with pytest.raises(LocalProtocolError, match="second broker"):  # noqa: PT012  # at its end
        async with shop.cluster.transaction() as tx:
            tx.send(shop.topic, b"here", key=HERE[0])
            tx.send(shop.topic, b"there", key=THERE[0])
    async with shop.cluster.transaction() as tx:
        tx.send(shop.topic, b"only any")
    await face.until(lambda: sum("only any" in stored for stored in shop.stored()) == 1)
    assert "here" not in shop.stored()[0]


async def test_an_ack_names_the_broker_that_decides_alone(face: Face, open_shop: OpenShop) -> None:
    shop, answers = await open_shop(), fresh("answers")
    for key in (HERE[0], THERE[0]):
        await shop.cluster.send(shop.topic, key.encode(), key=key)
    async with await shop.cluster.consumer(fresh("g"), [shop.topic]) as consumer:
        messages = [await consumer.receive(PATIENCE_S) for _ in range(2)]
        with suppress(ApplicationError):
            async with shop.cluster.transaction() as tx:
                tx.ack(messages[0])
                with pytest.raises(LocalProtocolError, match="second broker"):
                    tx.ack(messages[1])
                fail()
        for message in messages:
            async with shop.cluster.transaction() as tx:
                tx.ack(message)
                tx.send(answers, message.body)
    found = {one.body.decode() async for one in shop.cluster.find(answers)}
    assert found == {HERE[0], THERE[0]}


async def test_a_checker_decides_what_belongs_to_its_broker(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    async with shop.cluster.transaction(checker="payments") as tx:
        tx.send(shop.topic, b"paid", key=THERE[0])
        tx.send(shop.topic, b"any")
        await tx.prepare()
        assert shop.stored() == [set(), set()]
    await tx.wait_published(PATIENCE_S)
    assert shop.stored() == [set(), {"paid", "any"}]
    with suppress(ApplicationError):
        async with shop.cluster.transaction(checker="payments") as tx:
            tx.send(shop.topic, b"not paid", key=THERE[0])
            await tx.prepare()
            fail()
    await face.until(shop.settled)
    assert shop.stored() == [set(), {"paid", "any"}]


async def test_the_checkers_answer_decides_where_the_producer_is_gone(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    shop.cluster.register_checker("orders", lambda _half: COMMIT)
    for key in (HERE[0], THERE[0]):
        half = await face.half(
            shop.cluster, shop.topic, key.encode(), key=key, checker="orders", check_after=0.1
        )
        end_work(half.token)  # as if the producer were gone
    await face.until(lambda: all(shop.stored()))


async def test_half_messages_go_to_the_brokers_of_their_keys(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    halves = {
        key: await face.half(shop.cluster, shop.topic, key.encode(), key=key, checker="orders")
        for key in KEYS
    }
    for key, half in halves.items():
        await (half.rollback() if key == "k0" else half.commit())
    assert shop.stored() == [{*HERE} - {"k0"}, {*THERE} - {"k0"}]


async def test_rows_of_two_databases_and_messages_of_two_brokers_exist_together(
    face: Face, open_shop: OpenShop, postgres: PostgresServer
) -> None:
    shop, other = await open_shop(), postgres.create_database()
    make_tables(postgres.dsn(other))
    connection = await face.database(postgres.dsn(other))
    async with shop.cluster.xa(shop.connection, connection) as tx:
        await shop.insert("o-1")
        await shop.insert("o-1", connection)
        for key in KEYS:
            tx.send(shop.topic, key.encode(), key=key)
    await tx.wait_published(PATIENCE_S)
    assert tx.unfinished == ()
    assert shop.stored() == [set(HERE), set(THERE)]
    with suppress(ApplicationError):
        async with shop.cluster.xa(shop.connection, connection) as tx:
            await shop.insert("o-2")
            await shop.insert("o-2", connection)
            tx.send(shop.topic, b"withdrawn", key="k0")
            fail()
    assert shop.orders() == {"o-1"}
    await given(connection.close())
    postgres.drop_database(other)


async def test_without_one_of_its_brokers_a_transaction_leaves_nothing(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    with Proxy(shop.brokers[1].url) as proxy:
        cluster = face.connect([shop.brokers[0].url, proxy.url], service="orders")
        for key in KEYS:
            await cluster.send(shop.topic, b"before", key=key)
        proxy.cut()
        with pytest.raises(BrokerUnavailable):  # noqa: PT012  # at its end
            async with cluster.transaction(shop.connection, timeout=0.5) as tx:
                await shop.insert("o-1")
                for key in KEYS:
                    tx.send(shop.topic, key.encode(), key=key)
        assert shop.orders() == set()
        async with cluster.transaction(shop.connection) as tx:
            await shop.insert("o-2")
            tx.send(shop.topic, b"there", key=HERE[0])
    await face.until(shop.settled)
    assert (shop.orders(), shop.stored()) == ({"o-2"}, [{"before", "there"}, {"before"}])


async def test_without_a_broker_for_the_lookup_the_rows_are_rolled_back(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    cluster = face.connect([shop.brokers[0].url, NOBODY], service="orders", timeout=0.5)
    with pytest.raises(BrokerUnavailable):  # noqa: PT012  # at its end
        async with cluster.transaction(shop.connection, timeout=0.5) as tx:
            await shop.insert("o-1")
            tx.send(shop.topic, b"", key="k0")
    await shop.place(shop.cluster, "o-2")
    assert shop.orders() == {"o-2"}


async def test_topics_are_looked_up_in_the_time_of_the_transaction(
    face: Face, open_shop: OpenShop
) -> None:
    """The rows of the transaction are locked meanwhile."""
    shop, began = await open_shop(), time.monotonic()
    for urls in (NOBODY, [shop.brokers[0].url, NOBODY]):
        client = face.connect(urls, service="orders", timeout=3 * PATIENCE_S)
        with pytest.raises(TxmqError):  # noqa: PT012  # at its end
            async with client.transaction(shop.connection, timeout=0.2) as tx:
                await shop.insert("o-1")
                tx.send(shop.topic, b"", key=HERE[0])
    assert time.monotonic() - began < 3 * PATIENCE_S
    assert shop.orders() == set()


async def test_keyless_transactions_avoid_a_broker_that_is_away(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    with Proxy(shop.brokers[1].url) as proxy:
        urls = [shop.brokers[0].url, proxy.url]
        cluster = face.connect(urls, service="orders", timeout=12.0)
        for client in cluster.clients:
            await client.call("topic.list")
        proxy.cut()
        refused = 0
        for _ in range(6):
            try:
                async with cluster.transaction(shop.connection, timeout=12.0) as tx:
                    tx.send(shop.topic, b"any")
            except BrokerUnavailable:
                refused += 1
        assert refused <= 1
    assert len(bodies(shop.brokers[0], shop.topic)) == 6 - refused


async def test_the_outbox_keeps_the_messages_of_the_broker_that_is_away(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    with Proxy(shop.brokers[1].url) as proxy:
        cluster = face.connect([shop.brokers[0].url, proxy.url], service="orders")
        for key in (HERE[0], THERE[0]):
            await cluster.send(shop.topic, b"before", key=key)
        proxy.cut()
        options: dict[str, Any] = {"timeout": 0.3, "on_unavailable": "outbox"}
        async with cluster.transaction(shop.connection, **options) as tx:
            await shop.insert("o-1")
            tx.send(shop.topic, b"here", key=HERE[0])
            tx.send(shop.topic, b"there", key=THERE[0])
    await face.until(lambda: shop.stored() == [{"before", "here"}, {"before", "there"}])
    assert shop.orders() == {"o-1"}


async def test_a_refused_commit_takes_back_the_messages_of_all_brokers(
    face: Face, open_shop: OpenShop
) -> None:
    shop = await open_shop()
    with pytest.raises(TransactionAborted):  # noqa: PT012  # at its end
        async with shop.cluster.transaction(shop.connection) as tx:
            await face.execute(shop.connection, "INSERT INTO lines VALUES (1, 'no such order')")
            for key in KEYS:
                tx.send(shop.topic, b"", key=key)
    await face.until(shop.settled)
    assert shop.stored() == [set(), set()]
