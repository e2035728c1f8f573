"""Several brokers: keys keep their place, other messages avoid a broker that is away,
and consumers read all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from threading import Event, Thread

import psycopg2
import pytest

import txmq
from tests.client.consuming import fresh
from tests.client.real import RealBroker
from txmq.client.blocking.cluster import Cluster
from txmq.client.blocking.consumer.cluster import Consumers
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.errors import (
    BrokerUnavailable,
    ConfigError,
    LocalProtocolError,
    NotLeased,
    TxmqError,
    UnknownTopic,
)
from txmq.model.message import Message, ReceivedMessage
from txmq.testing.ports import free_port
from txmq.testing.wait import wait_until
from txmq.tx.postgres.session import Connection

WAIT_S = 30.0
KEYS = [f"k{number}" for number in range(12)]


@pytest.fixture
def cluster(shared_broker: RealBroker, second: RealBroker) -> Iterator[Cluster]:
    with txmq.connect([shared_broker.url, second.url], service="tests", timeout=WAIT_S) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """The broker that tests may stop; they start it again."""
    broker = RealBroker(tmp_path_factory.mktemp("second"))
    yield broker
    broker.stop()


def make(cluster: Cluster, partitions: int = 2) -> str:
    topic = fresh("t")
    for client in cluster.clients:
        client.call("topic.create", name=topic, partitions=partitions)
    return topic


def drained(consumers: Consumers, count: int) -> list[ReceivedMessage]:
    found = list[ReceivedMessage]()
    while len(found) < count:
        message = consumers.receive(WAIT_S)
        assert message is not None, f"{len(found)} of {count} came"
        consumers.ack(message)
        found.append(message)
    return found


def test_messages_of_all_brokers_come_out_of_one_consumer(cluster: Cluster) -> None:
    topic = make(cluster)
    sent = [cluster.send(topic, key.encode(), key=key) for key in KEYS]
    sent += cluster.send_batch(topic, [Message(key.encode(), key) for key in KEYS])
    cluster.send_many(topic, [b"many"] * 4, ["k0", "k1", "k2", None])
    cluster.send_one_way(topic, b"lost or not", partition=3)
    sent.append(cluster.send_async(topic, b"later", key="k1").result(WAIT_S))
    with cluster.consumer(fresh("g"), [topic]) as consumers:
        found = drained(consumers, 2 * len(KEYS) + 6)
        assert {receipt.message_id for receipt in sent} <= {message.message_id for message in found}
        homes: dict[str | None, set[tuple[int, int]]] = {}
        for message in found:
            part = consumers.parts.index(consumers.part_of(message))
            homes.setdefault(message.key, set()).add((part, message.partition))
        assert all(len(places) == 1 for key, places in homes.items() if key), "a key has one place"
        assert {part for places in homes.values() for part, _partition in places} == {0, 1}
        assert consumers.stats.acked == len(found)


def test_a_broker_that_is_away_stops_only_its_partitions(
    cluster: Cluster, second: RealBroker
) -> None:
    topic = make(cluster)
    cluster.send_batch(topic, [Message(b"", key) for key in KEYS])
    with cluster.consumer(fresh("g"), [topic]) as consumers:
        drained(consumers, len(KEYS))
        second.kill()
        wait_until(
            lambda: not consumers.parts[1].serving,
            timeout_s=WAIT_S,
            what="the loss of the second broker",
        )
        with pytest.raises(
            TxmqError
        ):  # connections from before break, and then nobody knows what became of a message
            cluster.clients[1].send(topic, b"", timeout=0.5)
        keyless = [cluster.send(topic, b"anywhere", timeout=12.0) for _ in range(4)]
        assert {message.message_id for message in drained(consumers, 4)} == {
            one.message_id for one in keyless
        }
        away = next(key for key in KEYS if cluster._routing.map.chosen(topic, key)[0] == 1)  # type: ignore[index]
        with pytest.raises(BrokerUnavailable):
            cluster.send(topic, b"", key=away, timeout=0.1)
        second.start()
        sent = cluster.send(
            topic, b"", key=away
        ).message_id  # others may come again: their acks may have been lost
        wait_until(
            lambda: drained(consumers, 1)[0].message_id == sent,
            WAIT_S,
            what="the second broker's message",
        )


def test_a_consumer_may_begin_while_a_broker_is_away(shared_broker: RealBroker) -> None:
    nobody = f"txmq://127.0.0.1:{free_port()}"
    with txmq.connect([nobody, shared_broker.url], timeout=4.0) as cluster:
        topic = fresh("t")
        cluster.clients[1].call("topic.create", name=topic, partitions=1)
        assert [cluster.send(topic, b"here", timeout=12.0).partition for _ in range(2)] == [0, 0]
        for _ in range(2):  # at least one of them would first go to the broker that is away
            assert cluster.send_batch(topic, [Message(b"here")], timeout=12.0)[0].topic == topic
            assert (
                sum(batch.count for batch in cluster.send_many(topic, [b"here"] * 2, timeout=12.0))
                == 2
            )
        with cluster.consumer(fresh("g"), [topic]) as consumers:
            assert {message.body for message in drained(consumers, 8)} == {b"here"}
    with txmq.connect([nobody], timeout=0.1) as cluster, pytest.raises(BrokerUnavailable):
        cluster.consumer(fresh("g"), ["t"])


def test_handlers_work_on_messages_of_all_brokers_and_failures_go_home(cluster: Cluster) -> None:
    topic, group, stop, seen = make(cluster, 1), fresh("g"), Event(), list[str]()
    cluster.send_batch(topic, [Message(b"", key) for key in KEYS])

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.key or "")
        if len(seen) > len(KEYS):
            stop.set()
        if seen.count("k3") == 1 and message.key == "k3":
            raise ValueError(message.key)

    retry = txmq.RetryPolicy.table(0, attempts=50)
    with cluster.consumer(group, [topic], retry=retry) as consumers:
        consumers.run(handle, threads=2, stop=stop)
        assert consumers.stats.nacked == 1
    assert sorted(seen) == sorted([*KEYS, "k3"])


def test_offsets_of_several_brokers_are_told_apart_in_an_inbox(cluster: Cluster) -> None:
    topic, group = make(cluster, 1), fresh("g")
    with cluster.consumer(group, [topic]) as consumers:
        for client in cluster.clients:
            client.send(topic, b"")
        names = {consumers.inbox_of(message) for message in drained(consumers, 2)}
    assert names == {f"{group}#{client.log_id}" for client in cluster.clients}


def test_with_an_inbox_messages_at_the_same_place_of_two_brokers_both_take_effect(
    cluster: Cluster, database: str
) -> None:
    topic, group = make(cluster, 1), fresh("g")
    for number, client in enumerate(cluster.clients):
        client.send_batch(topic, [Message(f"{number}{place}".encode()) for place in range(5)])
    with (
        closing(psycopg2.connect(database)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("CREATE TABLE effects (body text)")

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO effects VALUES (%s)", (message.body.decode(),))

    for _ in range(2):
        with cluster.consumer(group, [topic]) as consumers:
            stop = Event()
            options = {"inbox": lambda: psycopg2.connect(database), "threads": 2, "stop": stop}
            thread = Thread(target=consumers.run, args=(handle,), kwargs=options)
            thread.start()
            wait_until(lambda: consumers.stats.acked == 10, WAIT_S, what="all of both brokers")
            stop.set()
            thread.join()
        for client in cluster.clients:  # as if the acks had been lost
            client.call("group.reset", group=group, topic=topic, to="first")
    with closing(psycopg2.connect(database)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT body FROM effects ORDER BY body")
        assert [body for (body,) in cursor.fetchall()] == [
            f"{n}{place}" for n in range(2) for place in range(5)
        ]


OF_ONE_BROKER = {
    "ack_actions",
    "transaction_over",
    "assignment",
    "epoch",
    "group",
    "inbox_name",
    "log_id",
    "member",
}
OF_A_PART = {"abandon", "failure", "parts", "serving", "start", "take_no_more", "taken", "trouble"}


def test_consumers_of_several_brokers_do_all_that_one_of_a_single_broker_does() -> None:
    one, several = (
        {name for name in dir(kind) if not name.startswith("_")} for kind in (Consumer, Consumers)
    )
    assert one - several - OF_ONE_BROKER - OF_A_PART == set()


def test_what_is_not_its_own_is_refused(cluster: Cluster) -> None:
    topic = make(cluster, 1)
    cluster.send(topic, b"")
    with (
        cluster.consumer(fresh("g"), [topic]) as consumers,
        cluster.consumer(fresh("g"), [topic]) as others,
    ):
        [message] = drained(consumers, 1)
        with pytest.raises(LocalProtocolError):
            others.ack(message)
        with pytest.raises(NotLeased):
            consumers.nack(message)


def test_connections_that_cannot_be_meant_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError):
        txmq.connect([])
    with pytest.raises(ConfigError):
        txmq.connect("txmq://127.0.0.1:1", partition_map={"t": (1,)})  # type: ignore[call-overload]  # refused
    with pytest.raises(UnknownTopic):
        cluster.clients[0].call("topic.show", name="nothing")
