"""A cluster on Twisted: as the blocking one, but one reactor waits for all brokers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import txmq.twisted
from tests.client.reactor_thread import WAIT_S, InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client as BlockingClient
from txmq.client.blocking.cluster import Cluster as BlockingCluster
from txmq.client.blocking.consumer.consumer import Consumer as BlockingConsumer
from txmq.client.protocol.offsets import FileOffsets
from txmq.errors import (
    BrokerUnavailable,
    ConfigError,
    LocalProtocolError,
    NotLeased,
    RecallTooLate,
    UnknownTopic,
)
from txmq.model.message import Message, ReceivedMessage
from txmq.testing.ports import free_port
from txmq.testing.wait import wait_until
from txmq.twisted import Client, Cluster, Consumer, Consumers, Reader, Readers

KEYS = [f"k{number}" for number in range(12)]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """A broker that tests may stop, and start again."""
    broker = RealBroker(tmp_path_factory.mktemp("second"))
    yield broker
    broker.stop()


@pytest.fixture
def cluster(
    reactor: Any, in_reactor: InReactor, shared_broker: RealBroker, second: RealBroker
) -> Iterator[Cluster]:
    cluster = txmq.twisted.connect(
        reactor, [shared_broker.url, second.url], service="tests", timeout=WAIT_S
    )
    yield cluster

    async def close() -> None:
        await cluster.close()

    in_reactor(close)


async def make(cluster: Cluster, partitions: int = 2) -> str:
    topic = fresh("t")
    for client in cluster.clients:
        await client.call("topic.create", name=topic, partitions=partitions)
    return topic


async def drained(consumers: Consumers, count: int) -> list[ReceivedMessage]:
    found = list[ReceivedMessage]()
    while len(found) < count:
        message = await consumers.receive(WAIT_S)
        assert message is not None, f"{len(found)} of {count} came"
        await consumers.ack(message, wait=True)
        found.append(message)
    return found


def test_messages_of_all_brokers_come_out_of_one_consumer(
    cluster: Cluster, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic = await make(cluster)
        sent = [await cluster.send(topic, key.encode(), key=key) for key in KEYS]
        sent += await cluster.send_batch(topic, [Message(key.encode(), key) for key in KEYS])
        await cluster.send_many(topic, [b"many"] * 4, ["k0", "k1", "k2", None])
        cluster.send_one_way(topic, b"lost or not", partition=3)
        await cluster.flush()
        consumers = await cluster.consumer(fresh("g"), [topic])
        found = await drained(consumers, 2 * len(KEYS) + 5)
        assert {receipt.message_id for receipt in sent} <= {message.message_id for message in found}
        assert [one.message_id for one in sent] == list(
            dict.fromkeys(one.message_id for one in sent)
        )
        homes: dict[str | None, set[tuple[int, int]]] = {}
        for message in found:
            part = consumers._members.members.index(consumers._members.member_of(message))
            homes.setdefault(message.key, set()).add((part, message.partition))
        assert all(len(places) == 1 for key, places in homes.items() if key), "a key has one place"
        assert {part for places in homes.values() for part, _partition in places} == {0, 1}
        assert consumers.stats.acked == len(found)
        assert await consumers.receive(0.0) is None

    in_reactor(story)


def test_a_broker_that_is_killed_stops_only_its_partitions(
    cluster: Cluster, second: RealBroker, in_reactor: InReactor
) -> None:
    kept: list[Any] = []

    async def before() -> None:
        topic = await make(cluster)
        await cluster.send_batch(topic, [Message(b"", key) for key in KEYS])
        consumers = await cluster.consumer(fresh("g"), [topic])
        await drained(consumers, len(KEYS))
        kept.extend((topic, consumers))

    async def during() -> None:
        topic, consumers = kept
        keyless = [await cluster.send(topic, b"anywhere") for _ in range(4)]
        keyless += await cluster.send_batch(topic, [Message(b"anywhere")] * 2)
        found = await drained(consumers, 6)
        assert {message.message_id for message in found} == {
            receipt.message_id for receipt in keyless
        }
        assert {consumers._members.member_of(message) for message in found} == {
            consumers._members.members[0]
        }
        away = next(key for key in KEYS if cluster._routing.required_route(topic, key)[0] == 1)  # type: ignore[index]
        kept.append(cluster.send(topic, b"waits", key=away))

    async def after() -> None:
        _topic, consumers, waiting = kept
        receipt = await waiting
        while (await drained(consumers, 1))[0].message_id != receipt.message_id:
            pass  # others may come again: their acks may have been lost
        await consumers.close()
        assert await consumers.receive() is None

    in_reactor(before)
    second.kill()
    wait_until(
        lambda: not kept[1]._members.members[1].serving,
        WAIT_S,
        what="the loss of the second broker",
    )
    wait_until(
        lambda: cluster.clients[1]._core.is_disconnected,
        WAIT_S,
        what="the loss of the sending connection",
    )
    in_reactor(during)
    second.start()
    in_reactor(after)


def test_a_consumer_may_begin_while_a_broker_is_away(
    reactor: Any, shared_broker: RealBroker, in_reactor: InReactor
) -> None:
    async def story() -> None:
        nobody = f"txmq://127.0.0.1:{free_port()}"
        async with txmq.twisted.connect(
            reactor, [nobody, shared_broker.url], timeout=4.0
        ) as cluster:
            topic = fresh("t")
            await cluster.clients[1].call("topic.create", name=topic, partitions=1)
            assert [(await cluster.send(topic, b"here")).partition for _ in range(2)] == [0, 0]
            async with await cluster.consumer(fresh("g"), [topic]) as consumers:
                assert [message.body for message in await drained(consumers, 2)] == [
                    b"here",
                    b"here",
                ]
            with pytest.raises(BrokerUnavailable):  # who has the key, only both brokers can tell
                await cluster.send(topic, b"", key="k")
        async with txmq.twisted.connect(reactor, [nobody], timeout=0.1) as alone:
            with pytest.raises(BrokerUnavailable):
                await alone.consumer(fresh("g"), ["t"])
            with pytest.raises(BrokerUnavailable):
                await alone.send("t", b"")

    in_reactor(story)


def test_with_a_map_keys_find_their_partition_without_asking(
    reactor: Any, shared_broker: RealBroker, in_reactor: InReactor
) -> None:
    async def story() -> None:
        urls, topic = [f"txmq://127.0.0.1:{free_port()}", shared_broker.url], fresh("t")
        async with txmq.twisted.connect(
            reactor, urls, timeout=WAIT_S, partition_map={topic: (0, 4)}
        ) as cluster:
            await cluster.clients[1].call("topic.create", name=topic, partitions=4)
            assert (await cluster.send(topic, b"", partition=3)).partition == 3
            receipts = await cluster.send_batch(topic, [Message(b"", key) for key in KEYS])
            assert len({receipt.partition for receipt in receipts}) > 1
            with pytest.raises(LocalProtocolError):
                await cluster.send(topic, b"", partition=4)

    in_reactor(story)


@pytest.mark.parametrize("batch", [None, 4])
def test_handlers_work_on_messages_of_all_brokers_and_failures_go_home(
    cluster: Cluster, in_reactor: InReactor, batch: int | None
) -> None:
    async def story() -> None:
        topic, seen = await make(cluster, 1), list[str]()
        await cluster.send_batch(topic, [Message(b"", key) for key in KEYS])
        retry = txmq.RetryPolicy.table(0, attempts=50)
        consumers = await cluster.consumer(fresh("g"), [topic], retry=retry)

        async def handle(given: Any) -> None:
            messages = given if batch else [given]
            await cluster.clients[0].call("topic.list")  # others are at work meanwhile
            seen.extend(message.key for message in messages)
            if any(message.key == "k3" and message.attempt == 1 for message in messages):
                raise ValueError("k3")

        work = consumers.run(handle, workers=2, batch=batch, batch_wait=0.01 if batch else 0.0)
        while consumers.stats.acked < len(KEYS):
            await cluster.clients[0].call("topic.list")
        await consumers.close()
        await work
        assert set(seen) == set(KEYS)
        assert seen.count("k3") == 2
        assert consumers.stats.nacked >= 1

    in_reactor(story)


def test_a_handler_that_is_at_work_is_waited_for_and_idleness_ends_the_run(
    cluster: Cluster, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic, done = await make(cluster, 1), list[bytes]()
        await cluster.send(topic, b"0", key="k")
        consumers = await cluster.consumer(fresh("g"), [topic])
        closing = list[Any]()

        async def handle(message: ReceivedMessage) -> None:
            closing.append(consumers.close())
            await cluster.clients[0].call("topic.list")
            done.append(message.body)

        await consumers.run(handle)
        await closing[0]
        assert (done, consumers.stats.acked, consumers.stats.returned) == ([b"0"], 1, 0)
        await cluster.send(topic, b"1", key="k")
        async with await cluster.consumer(fresh("g"), [topic]) as others:
            await drained(others, 1)  # the other one comes with it
            await others.run(lambda message: done.append(message.body), workers=2, idle_exit=2.0)
            with pytest.raises(LocalProtocolError):
                await others.run(print, workers=0)
        assert done == [b"0", b"1"]

    in_reactor(story)


def test_a_message_of_another_consumer_is_refused(cluster: Cluster, in_reactor: InReactor) -> None:
    async def story() -> None:
        topic = await make(cluster, 1)
        for client in cluster.clients:
            await client.send(topic, b"")
        consumers, others = [await cluster.consumer(fresh("g"), [topic]) for _ in range(2)]
        message = await consumers.receive(WAIT_S)
        assert message is not None
        with pytest.raises(LocalProtocolError):
            others.ack(message)
        there = cluster.clients[
            1 - consumers._members.members.index(consumers._members.member_of(message))
        ]
        with pytest.raises(LocalProtocolError, match="another broker"):
            async with there.transaction() as tx:
                tx.ack(message)
        await consumers.ack(message, wait=True)
        with pytest.raises(NotLeased):
            consumers.nack(message)

    in_reactor(story)


def test_invalid_arguments_of_connect_are_refused(reactor: Any) -> None:
    with pytest.raises(ConfigError):
        txmq.twisted.connect(reactor, [])
    with pytest.raises(ConfigError):
        txmq.twisted.connect(reactor, "txmq://127.0.0.1:1", partition_map={"t": (1,)})  # type: ignore[call-overload]


IN_THREADS = {"count", "inbox_of", "inbox_name", "parts", "start", "taken", "join"}


def names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_cluster_has_the_calls_of_a_client() -> None:
    assert names(Cluster) == names(Client)
    assert names(BlockingCluster) == names(BlockingClient)


def test_both_faces_can_do_the_same() -> None:
    assert names(BlockingConsumer) - names(Consumer) <= IN_THREADS
    assert names(Consumer) - names(Consumers) <= names(BlockingConsumer) | {
        "take_from",
        "look",
        "joined",
        "when_serving",
    }
    assert names(Reader) == names(Readers)


def test_one_reader_reads_all_brokers_from_where_it_was(
    cluster: Cluster, in_reactor: InReactor, tmp_path: Path
) -> None:
    async def story() -> None:
        topic = await make(cluster)
        for key in KEYS:
            await cluster.send(topic, key.encode(), key=key)
        store = FileOffsets(tmp_path)
        async with await cluster.reader("audit", [topic], store) as reader:
            read = [await received(reader) for _ in KEYS[:5]]
            await reader.commit()
        async with await cluster.reader("audit", [topic], FileOffsets(tmp_path)) as reader:
            read += [await received(reader) for _ in KEYS[5:]]
            assert sorted(read) == sorted(key.encode() for key in KEYS)
            assert await reader.receive(0.05) is None
            waiting = reader.receive()
            with pytest.raises(LocalProtocolError, match="another call"):
                reader.receive()
            await cluster.send(topic, b"later", partition=3)
            message = await waiting
            assert message is not None
            assert message.body == b"later"
            assert reader.missed == 0
            with pytest.raises(LocalProtocolError, match="one broker"):
                _positions = reader.positions
            with pytest.raises(LocalProtocolError, match="one broker"):
                reader.assign(None)
            waiting = reader.receive()
        assert await waiting is None, "closed"

    in_reactor(story)


async def received(reader: Readers) -> bytes:
    message = await reader.receive(WAIT_S)
    assert message is not None
    return message.body


def test_messages_of_all_brokers_are_found_and_read(
    cluster: Cluster, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic = await make(cluster)
        sent = [await cluster.send(topic, key.encode(), key=key) for key in KEYS]
        found = [one async for one in cluster.find(topic)]
        assert {one.message_id for one in found} == {receipt.message_id for receipt in sent}
        [one] = [one async for one in cluster.find(topic, key="k1")]
        assert one.body == b"k1"
        at = [
            [one.message_id async for one in cluster.find(topic, partition=number)]
            for number in range(4)
        ]
        assert sorted(chain.from_iterable(at)) == sorted(one.message_id for one in found)
        for number in range(4):
            read = await cluster.read(topic, number, 0)
            assert [message.message_id for message in read.messages] == at[number]
        with pytest.raises(UnknownTopic):
            [one async for one in cluster.find(fresh("none"))]

    in_reactor(story)


def test_a_delayed_message_is_recalled_wherever_it_is(
    cluster: Cluster, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic = await make(cluster)
        for partition in (0, 2):
            receipt = await cluster.send(topic, b"", partition=partition, delay=3_600)
            await cluster.recall(receipt)
        with pytest.raises(RecallTooLate):
            await cluster.recall(await cluster.send(topic, b""))

    in_reactor(story)


def test_calls_of_one_broker_say_where_they_belong(cluster: Cluster) -> None:
    with pytest.raises(LocalProtocolError, match=r"cluster\.clients\[0\]"):
        cluster.call("topic.list")
    with pytest.raises(LocalProtocolError, match=r"cluster\.clients\[0\]"):
        cluster.log_id()
