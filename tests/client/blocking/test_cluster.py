"""Clusters: keys keep their partition, other messages avoid a broker that is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from threading import Event, Thread

import psycopg2
import pytest

import txmq
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.cluster import Cluster
from txmq.client.blocking.consumer.consumer import Consumer, Consumers
from txmq.client.blocking.reader import Readers
from txmq.client.protocol.offsets import FileOffsets
from txmq.errors import (
    BrokerUnavailable,
    ConfigError,
    ConnectionLost,
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
    """A broker that tests may stop, and start again."""
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
            part = consumers._members.members.index(consumers._members.member_of(message))
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
            lambda: not consumers._members.members[1].serving,
            timeout_s=WAIT_S,
            what="the loss of the second broker",
        )
        # connections from before break, and then nobody knows what became of a message
        with pytest.raises(TxmqError):
            cluster.clients[1].send(topic, b"", timeout=0.5)
        keyless = [cluster.send(topic, b"anywhere", timeout=12.0) for _ in range(4)]
        assert {message.message_id for message in drained(consumers, 4)} == {
            one.message_id for one in keyless
        }
        away = next(key for key in KEYS if cluster._routing.map.choose(topic, key)[0] == 1)  # type: ignore[index]
        with pytest.raises(BrokerUnavailable):
            cluster.send(topic, b"", key=away, timeout=0.1)
        second.start()
        # others may come again: their acks may have been lost
        sent = cluster.send(topic, b"", key=away).message_id
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


OF_ONE_BROKER = {"assignment", "epoch", "group", "member"}


def test_a_consumer_of_a_cluster_has_the_calls_of_a_consumer_of_one_broker() -> None:
    one, several = (
        {name for name in dir(kind) if not name.startswith("_")} for kind in (Consumer, Consumers)
    )
    assert one - several - OF_ONE_BROKER == set()


def test_a_message_of_another_consumer_is_refused(cluster: Cluster) -> None:
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


def test_invalid_arguments_of_connect_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError):
        txmq.connect([])
    with pytest.raises(ConfigError):
        txmq.connect("txmq://127.0.0.1:1", partition_map={"t": (1,)})  # type: ignore[call-overload]  # refused
    with pytest.raises(UnknownTopic):
        cluster.clients[0].call("topic.show", name="nothing")


def test_one_reader_reads_all_brokers_from_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    topic = make(cluster)
    for key in KEYS:
        cluster.send(topic, key.encode(), key=key)
    with cluster.reader("audit", [topic], FileOffsets(tmp_path)) as reader:
        read = [received(reader) for _ in KEYS[:5]]
        reader.commit()
    with cluster.reader("audit", [topic], FileOffsets(tmp_path)) as reader:
        read += [received(reader) for _ in KEYS[5:]]
        assert sorted(read) == sorted(key.encode() for key in KEYS)
        assert reader.receive(0.05) is None
        cluster.send(topic, b"later", partition=3)
        assert received(reader) == b"later"
        assert reader.missed == 0
        with pytest.raises(LocalProtocolError, match="one broker"):
            _positions = reader.positions
        with pytest.raises(LocalProtocolError, match="one broker"):
            reader.assign(None)
    with (
        cluster.reader("audit", [topic], FileOffsets(tmp_path)),
        pytest.raises(ConfigError, match="uses this directory"),
    ):
        cluster.reader("audit", [topic], FileOffsets(tmp_path))


def received(reader: Readers) -> bytes:
    message = reader.receive(WAIT_S)
    assert message is not None
    return message.body


def test_a_reader_goes_on_where_a_broker_comes_back(
    cluster: Cluster, second: RealBroker, tmp_path: Path
) -> None:
    topic = make(cluster)
    with cluster.reader("audit", [topic], FileOffsets(tmp_path), start="last") as reader:
        second.kill()
        cluster.clients[0].send(topic, b"here")
        assert received(reader) == b"here"
        second.start()
        with suppress(ConnectionLost):  # a connection from before
            cluster.clients[1].call("topic.list")
        cluster.clients[1].send(topic, b"there")
        assert received(reader) == b"there"


def test_messages_of_all_brokers_are_found(cluster: Cluster) -> None:
    topic = make(cluster)
    sent = [cluster.send(topic, key.encode(), key=key) for key in KEYS]
    found = {one.message_id: one for one in cluster.find(topic)}
    assert found.keys() == {receipt.message_id for receipt in sent}
    assert [one.body for one in cluster.find(topic, key="k1")] == [b"k1"]
    by_partition = [
        [one.message_id for one in cluster.find(topic, partition=number)] for number in range(4)
    ]
    assert sorted(chain.from_iterable(by_partition)) == sorted(found)
    with pytest.raises(UnknownTopic):
        next(cluster.find(fresh("none")))


def test_a_topic_that_one_broker_has_is_found_there(cluster: Cluster) -> None:
    topic = fresh("t")
    cluster.clients[1].send(topic, b"there")
    assert [one.body for one in cluster.find(topic)] == [b"there"]


def test_calls_of_one_broker_say_where_they_belong(cluster: Cluster) -> None:
    calls: list[Callable[[], object]] = [
        lambda: cluster.call("topic.list"),
        lambda: cluster.xa_resource("owner"),
        cluster.job,
        lambda: cluster.log_id,
    ]
    for call in calls:
        with pytest.raises(LocalProtocolError, match=r"cluster\.clients\[0\]"):
            call()


def test_stats_are_the_sums_over_all_brokers(cluster: Cluster) -> None:
    topic = make(cluster)
    for key in KEYS:
        cluster.send_async(topic, b"", key=key)
    cluster.flush()
    assert cluster.stats.messages == len(KEYS)
    assert cluster.service == "tests"
