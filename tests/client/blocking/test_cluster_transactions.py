"""Transactions over a cluster: each message and ack goes to its broker, by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg2
import pytest

import txmq
from tests.client.proxy import Proxy
from tests.client.real import RealBroker, bodies
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, fail, make_tables
from txmq.client.protocol.transaction.open_work import end_work
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    LocalProtocolError,
    RecallTooLate,
    TransactionAborted,
)
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.session import Connection

WAIT_S = 20.0
KEYS = [f"k{number}" for number in range(12)]


class BlockingClusterShop:
    """A database with orders, two brokers that may ask it, and their cluster."""

    def __init__(self, dsn: str, brokers: Sequence[RealBroker], cluster: txmq.Cluster) -> None:
        self.dsn, self.brokers, self.cluster = dsn, brokers, cluster
        self.connection: Connection = psycopg2.connect(dsn)
        self.topic = fresh("t")
        for client in cluster.clients:
            client.call("topic.create", name=self.topic, partitions=2)

    def insert(self, order: str, connection: Connection | None = None) -> None:
        with (connection or self.connection).cursor() as cursor:
            cursor.execute("INSERT INTO orders (id) VALUES (%s)", (order,))

    def orders(self) -> set[str]:
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id FROM orders")
            return {order for (order,) in cursor.fetchall()}

    def stored(self) -> list[set[str]]:
        """The bodies of the published messages at each broker."""
        return [{body.decode() for body in bodies(broker, self.topic)} for broker in self.brokers]

    def keys_of(self, broker: int) -> list[str]:
        """The keys of the topic that belong to a broker."""
        return [
            key
            for key in KEYS
            if self.cluster._routing.required_route(self.topic, key).broker == broker  # type: ignore[union-attr]
        ]

    def undecided(self) -> bool:
        return any(
            client.call("tx.list", state="undecided")["transactions"]
            for client in self.cluster.clients
        )

    def token_rows(self, token: UUID) -> int:
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM txmq_token WHERE tok = %s", (str(token),))
            [(rows,)] = cursor.fetchall()
        return int(rows)


@pytest.fixture
def shop(
    shared_database: str, deciding: RealBroker, also_deciding: RealBroker
) -> Iterator[BlockingClusterShop]:
    make_tables(shared_database)
    brokers = (deciding, also_deciding)
    with txmq.connect([broker.url for broker in brokers], service="orders") as cluster:
        shop = BlockingClusterShop(shared_database, brokers, cluster)
        yield shop
        shop.connection.close()


def test_rows_and_the_messages_of_all_keys_exist_together(shop: BlockingClusterShop) -> None:
    with shop.cluster.transaction(shop.connection) as tx:
        shop.insert("o-1")
        for key in KEYS:
            tx.send(shop.topic, key.encode(), key=key)
        tx.send_many(shop.topic, [key.encode() for key in KEYS], KEYS)
        assert shop.stored() == [set(), set()]
    tx.wait_published()
    assert isinstance(tx, txmq.Transaction)
    assert shop.orders() == {"o-1"}
    assert shop.stored() == [set(shop.keys_of(0)), set(shop.keys_of(1))]
    assert shop.token_rows(tx.token) == 2


def test_a_key_has_the_partition_that_plain_sends_of_it_have(shop: BlockingClusterShop) -> None:
    plain = {key: shop.cluster.send(shop.topic, b"plain", key=key) for key in KEYS}
    with shop.cluster.transaction(shop.connection) as tx:
        for key in KEYS:
            tx.send(shop.topic, b"", key=key)
    tx.wait_published()
    assert [(got.topic, got.partition) for got in tx.receipts()] == [
        (shop.topic, plain[key].partition) for key in KEYS
    ]


def test_receipts_are_in_the_order_of_the_sends_and_find_their_messages(
    shop: BlockingClusterShop,
) -> None:
    with shop.cluster.transaction(shop.connection) as tx:
        tx.send(shop.topic, b"k0", key="k0")
        tx.send(shop.topic, b"none")
        tx.send_many(shop.topic, [b"k1", b"none", b"k2"], ["k1", None, "k2"])
        tx.send(shop.topic, b"partition", partition=3)
        tx.send(shop.topic, b"k3", key="k3")
    tx.wait_published()
    receipts = tx.receipts()
    assert len({got.message_id for got in receipts}) == 7
    found = [list(shop.cluster.find(shop.topic, message_id=got)) for got in receipts]
    assert [[one.body for one in each] for each in found] == [
        [b"k0"], [b"none"], [b"k1"], [b"none"], [b"k2"], [b"partition"], [b"k3"]
    ]  # fmt: skip
    assert [got.offset for got in receipts] == [each[0].offset for each in found]


def test_messages_without_a_key_follow_those_with_one(shop: BlockingClusterShop) -> None:
    key = shop.keys_of(1)[0]
    with shop.cluster.transaction(shop.connection) as tx:
        tx.send(shop.topic, b"first")
        tx.send(shop.topic, b"key", key=key)
        tx.send_many(shop.topic, [b"last"])
    tx.wait_published()
    assert shop.stored() == [set(), {"first", "key", "last"}]
    assert shop.token_rows(tx.token) == 1


def test_a_named_broker_gets_its_messages_and_those_without_a_key(
    shop: BlockingClusterShop,
) -> None:
    with shop.cluster.transaction(shop.connection) as tx:
        tx.send(shop.topic, b"any")
        tx.at(shop.cluster.clients[1]).send(shop.topic, b"named", key=shop.keys_of(0)[0])
    tx.wait_published()
    assert shop.stored() == [set(), {"any", "named"}]


def test_a_block_that_raises_leaves_nothing_anywhere(shop: BlockingClusterShop) -> None:
    with suppress(ApplicationError), shop.cluster.transaction(shop.connection) as tx:
        shop.insert("o-1")
        for key in KEYS:
            tx.send(shop.topic, b"", key=key)
        fail()
    assert (shop.orders(), shop.stored()) == (set(), [set(), set()])
    with pytest.raises(ClientClosed):
        tx.send(shop.topic, b"late")


def test_a_savepoint_takes_back_the_sends_to_all_brokers(shop: BlockingClusterShop) -> None:
    with shop.cluster.transaction(shop.connection) as tx:
        shop.insert("o-1")
        tx.send(shop.topic, b"kept", key="k0")
        with suppress(ApplicationError), tx.savepoint():
            shop.insert("o-2")
            for key in KEYS:
                tx.send(shop.topic, b"withdrawn", key=key)
            fail()
    tx.wait_published()
    assert shop.orders() == {"o-1"}
    assert set.union(*shop.stored()) == {"kept"}


def test_a_partition_that_does_not_exist_rolls_the_rows_back(shop: BlockingClusterShop) -> None:
    def place() -> None:
        with shop.cluster.transaction(shop.connection) as tx:
            shop.insert("o-1")
            tx.send(shop.topic, b"", partition=4)

    with pytest.raises(LocalProtocolError, match="0 to 3"):
        place()
    assert shop.orders() == set()
    with shop.cluster.transaction(shop.connection):  # the connection is fit for others
        shop.insert("o-2")
    assert shop.orders() == {"o-2"}


def test_messages_are_acked_at_the_brokers_that_delivered_them(shop: BlockingClusterShop) -> None:
    for key in KEYS:
        shop.cluster.send(shop.topic, key.encode(), key=key)
    answers = fresh("answers")
    with shop.cluster.consumer(fresh("g"), [shop.topic]) as consumer:
        messages = [consumer.receive(WAIT_S) for _ in KEYS]
        with shop.cluster.transaction(shop.connection) as tx:
            for message in messages:
                assert message is not None
                tx.ack(message)
                tx.send(answers, message.body, key=message.key)
        tx.wait_published()
        wait_until(lambda: not shop.undecided(), WAIT_S)
    assert {found.body.decode() for found in shop.cluster.find(answers)} == set(KEYS)


def test_a_message_of_another_cluster_cannot_be_acked(
    shop: BlockingClusterShop, own_broker: RealBroker
) -> None:
    with txmq.connect(own_broker.url, service="others") as other:
        other.send("t", b"")
        with other.consumer("g", ["t"]) as consumer:
            message = consumer.receive(WAIT_S)
            with (
                shop.cluster.transaction(shop.connection) as tx,
                pytest.raises(LocalProtocolError, match="none of the cluster's brokers"),
            ):
                tx.ack(message)


def test_the_broker_alone_decides_what_belongs_to_it(shop: BlockingClusterShop) -> None:
    first, second = shop.keys_of(0), shop.keys_of(1)
    with shop.cluster.transaction() as tx:
        tx.send(shop.topic, b"any")
        tx.send(shop.topic, b"key", key=second[0])
        tx.send(shop.topic, b"other key", key=second[1])
    tx.wait_published()
    assert shop.stored() == [set(), {"any", "key", "other key"}]

    def send_to_both() -> None:
        with shop.cluster.transaction() as tx:
            tx.send(shop.topic, b"here", key=first[0])
            tx.send(shop.topic, b"there", key=second[0])

    with pytest.raises(LocalProtocolError, match=r"second broker.*client\.transaction\(conn"):
        send_to_both()
    assert shop.stored()[0] == set()


def test_a_checker_decides_what_belongs_to_its_broker(shop: BlockingClusterShop) -> None:
    key = shop.keys_of(1)[0]
    with shop.cluster.transaction(checker="payments") as tx:
        tx.send(shop.topic, b"paid", key=key)
        tx.send(shop.topic, b"any")
        tx.prepare()
        assert shop.stored() == [set(), set()]
    tx.wait_published()
    assert shop.stored() == [set(), {"paid", "any"}]
    with suppress(ApplicationError), shop.cluster.transaction(checker="payments") as tx:
        tx.send(shop.topic, b"not paid", key=key)
        tx.prepare()
        fail()
    assert not shop.undecided()
    assert shop.stored() == [set(), {"paid", "any"}]


def test_the_checkers_answer_decides_where_the_producer_is_gone(shop: BlockingClusterShop) -> None:
    shop.cluster.register_checker("orders", lambda _half: txmq.COMMIT)
    for key in (shop.keys_of(0)[0], shop.keys_of(1)[0]):
        half = shop.cluster.half_async(
            shop.topic, key.encode(), key=key, checker="orders", check_after=0.1
        )
        end_work(half.result(WAIT_S).token)  # as if the producer were gone
    wait_until(lambda: all(shop.stored()), WAIT_S)


def test_half_messages_go_to_the_brokers_of_their_keys(shop: BlockingClusterShop) -> None:
    halves = {
        key: shop.cluster.half_async(shop.topic, key.encode(), key=key, checker="orders")
        for key in KEYS
    }
    for key, half in halves.items():
        decision = half.result(WAIT_S).commit() if key != "k0" else half.result(WAIT_S).rollback()
        decision.result(WAIT_S)
    expected = [set(shop.keys_of(broker)) - {"k0"} for broker in range(2)]
    assert shop.stored() == expected


def test_rows_of_two_databases_and_messages_of_two_brokers_exist_together(
    shop: BlockingClusterShop, postgres: PostgresServer
) -> None:
    other = postgres.create_database()
    make_tables(postgres.dsn(other))
    with closing(psycopg2.connect(postgres.dsn(other))) as connection:
        with shop.cluster.xa(shop.connection, connection) as tx:
            shop.insert("o-1")
            shop.insert("o-1", connection)
            for key in KEYS:
                tx.send(shop.topic, key.encode(), key=key)
        tx.wait_published()
        assert tx.unfinished == ()
        assert isinstance(tx, txmq.XaTransaction)
        assert shop.stored() == [set(shop.keys_of(0)), set(shop.keys_of(1))]
        with suppress(ApplicationError), shop.cluster.xa(shop.connection, connection) as tx:
            shop.insert("o-2")
            shop.insert("o-2", connection)
            tx.send(shop.topic, b"withdrawn", key="k0")
            fail()
        assert shop.orders() == {"o-1"}
    postgres.drop_database(other)


def test_without_one_of_its_brokers_a_transaction_leaves_nothing(shop: BlockingClusterShop) -> None:
    with Proxy(shop.brokers[1].url) as proxy:
        urls = [shop.brokers[0].url, proxy.url]
        with txmq.connect(urls, service="orders") as cluster:
            for key in KEYS:
                cluster.send(shop.topic, b"before", key=key)
            proxy.cut()
            with pytest.raises(BrokerUnavailable):
                place_everywhere(shop, cluster, timeout=0.5)
            assert shop.orders() == set()
            only_here = [key for key in KEYS if key in shop.keys_of(0)]
            with cluster.transaction(shop.connection) as tx:
                shop.insert("o-2")
                tx.send(shop.topic, b"there", key=only_here[0])
    wait_until(lambda: not shop.undecided(), WAIT_S)
    assert (shop.orders(), shop.stored()) == ({"o-2"}, [{"before", "there"}, {"before"}])


def place_everywhere(shop: BlockingClusterShop, cluster: txmq.Cluster, **options: Any) -> None:
    """Insert an order, and send a message of each key."""
    with cluster.transaction(shop.connection, **options) as tx:
        shop.insert("o-1")
        for key in KEYS:
            tx.send(shop.topic, key.encode(), key=key)


def test_keyless_transactions_avoid_a_broker_that_is_away(shop: BlockingClusterShop) -> None:
    with Proxy(shop.brokers[1].url) as proxy:
        urls = [shop.brokers[0].url, proxy.url]
        with txmq.connect(urls, service="orders") as cluster:
            assert all(client.log_id for client in cluster.clients)
            proxy.cut()
            refused = 0
            for _ in range(6):
                try:
                    with cluster.transaction(shop.connection, timeout=2.0) as tx:
                        tx.send(shop.topic, b"any")
                except BrokerUnavailable:
                    refused += 1
            assert refused <= 1
    assert len(bodies(shop.brokers[0], shop.topic)) == 6 - refused


def test_the_outbox_keeps_the_messages_of_the_broker_that_is_away(
    shop: BlockingClusterShop,
) -> None:
    first, second = shop.keys_of(0)[0], shop.keys_of(1)[0]
    with Proxy(shop.brokers[1].url) as proxy:
        urls = [shop.brokers[0].url, proxy.url]
        with txmq.connect(urls, service="orders") as cluster:
            assert all(client.log_id for client in cluster.clients)
            cluster._routing.map.partition_counts(shop.topic)
            proxy.cut()
            with cluster.transaction(shop.connection, timeout=0.3, on_unavailable="outbox") as tx:
                shop.insert("o-1")
                tx.send(shop.topic, b"here", key=first)
                tx.send(shop.topic, b"there", key=second)
    wait_until(lambda: shop.stored() == [{"here"}, {"there"}], WAIT_S)
    assert shop.orders() == {"o-1"}


def test_a_refused_commit_takes_back_the_messages_of_all_brokers(shop: BlockingClusterShop) -> None:
    tx = shop.cluster.transaction(shop.connection)
    tx.__enter__()
    with shop.connection.cursor() as cursor:
        cursor.execute("INSERT INTO lines VALUES (1, 'no such order')")
    for key in KEYS:
        tx.send(shop.topic, b"", key=key)
    with pytest.raises(TransactionAborted):
        tx.__exit__(None, None, None)
    wait_until(lambda: not shop.undecided(), WAIT_S)
    assert shop.stored() == [set(), set()]


def test_a_delayed_message_is_recalled_wherever_it_is(shop: BlockingClusterShop) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    for broker in range(2):
        key = shop.keys_of(broker)[0]
        receipt = shop.cluster.send(shop.topic, b"", key=key, deliver_at=later)
        [waiting] = shop.cluster.find(message_id=receipt)
        assert waiting.state == "delayed"
        shop.cluster.recall(receipt)
        shop.cluster.recall(receipt)
    with pytest.raises(RecallTooLate):
        shop.cluster.recall(shop.cluster.send(shop.topic, b""))
