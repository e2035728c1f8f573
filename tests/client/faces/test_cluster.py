"""Clusters: keys keep their partition, other messages avoid a broker that is away."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import txmq.twisted
from tests.client.effects import EFFECT, effects, with_effects
from tests.client.faces.face import Face, given
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.cluster import Cluster
from txmq.client.blocking.consumer.consumer import Consumer, Consumers
from txmq.client.protocol.offsets import FileOffsets
from txmq.errors import (
    BrokerUnavailable,
    ConfigError,
    LocalProtocolError,
    NotLeased,
    RecallTooLate,
    TxmqError,
    UnknownTopic,
)
from txmq.model.keys import partition_of
from txmq.model.message import Message, ReceivedMessage
from txmq.testing.wait import PATIENCE_S

KEYS = [f"k{number}" for number in range(12)]
NOBODY = "txmq://127.0.0.1:1"
# Each of two brokers has half of it, that which is away as well.
AVOIDS_WITHIN_S = 12.0


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """A broker that tests may stop, and start again."""
    broker = RealBroker(tmp_path_factory.mktemp("second"))
    yield broker
    broker.stop()


@pytest.fixture
def brokers(shared_broker: RealBroker, second: RealBroker) -> list[RealBroker]:
    if second._process is None:  # as a test that failed has left it
        second.start()
    return [shared_broker, second]


async def opened(
    face: Face, brokers: list[RealBroker], partitions: int = 2, **options: Any
) -> tuple[Any, str]:
    """Return a cluster of the brokers, and a topic that each of them has."""
    cluster, topic = face.connect([broker.url for broker in brokers], **options), fresh("t")
    for client in cluster.clients:
        await client.call("topic.create", name=topic, partitions=partitions)
    return cluster, topic


async def drained(consumers: Any, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    while len(found) < count:
        message = await consumers.receive(PATIENCE_S)
        assert message is not None, f"{len(found)} of {count} came"
        await consumers.ack(message, wait=True)
        found.append(message)
    return found


async def test_messages_of_all_brokers_come_out_of_one_consumer(
    face: Face, brokers: list[RealBroker]
) -> None:
    cluster, topic = await opened(face, brokers)
    sent = [await cluster.send(topic, key.encode(), key=key) for key in KEYS]
    sent += await cluster.send_batch(topic, [Message(key.encode(), key) for key in KEYS])
    await cluster.send_many(topic, [b"many"] * 4, ["k0", "k1", "k2", None])
    cluster.send_one_way(topic, b"lost or not", partition=3)
    sent.append(await (await face.begin_send(cluster, topic, b"later", key="k1")))
    await cluster.flush()
    async with await cluster.consumer(fresh("g"), [topic]) as consumers:
        found = await drained(consumers, 2 * len(KEYS) + 6)
        assert {one.message_id for one in sent} <= {one.message_id for one in found}
        assert len({one.message_id for one in found}) == len(found)
        assert consumers.stats.acked == len(found)
        assert await consumers.receive(0.0) is None
    homes = {
        (one.key, 2 * number + one.partition)
        for number, broker in enumerate(brokers)
        for one in broker.read(topic)
        if one.key
    }
    assert homes == {(key, partition_of(key, 4)) for key in KEYS}


async def test_a_partition_is_read_at_its_broker(face: Face, brokers: list[RealBroker]) -> None:
    cluster, topic = await opened(face, brokers)
    await cluster.send(topic, b"of the second", partition=3)
    found = await cluster.read(topic, 3, 0)
    assert [(one.body, one.partition) for one in found.messages] == [(b"of the second", 1)]
    assert (await cluster.read(topic, 0, 0)).messages == []


async def test_a_broker_that_is_away_stops_only_its_partitions(
    face: Face, brokers: list[RealBroker]
) -> None:
    cluster, topic = await opened(face, brokers, timeout=AVOIDS_WITHIN_S)
    await cluster.send_batch(topic, [Message(b"", key) for key in KEYS])
    async with await cluster.consumer(fresh("g"), [topic]) as consumers:
        await drained(consumers, len(KEYS))
        brokers[1].kill()
        serving = partial(face.look, consumers, lambda one: one._members.members[1].serving)
        await face.until(lambda: not serving())
        # connections from before break, and then nobody knows what became of a message
        if face.name == "blocking":
            with pytest.raises(TxmqError):
                await cluster.clients[1].send(topic, b"", timeout=0.5)
        else:
            second = cluster.clients[1]
            await face.until(lambda: face.look(second, lambda one: one._core.is_disconnected))
        keyless = [await cluster.send(topic, b"anywhere") for _ in range(4)]
        keyless += await cluster.send_batch(topic, [Message(b"anywhere")] * 2)
        found = await drained(consumers, 6)
        assert {one.message_id for one in found} == {one.message_id for one in keyless}
        assert len(brokers[0].read(topic)) == 6 + sum(partition_of(key, 4) < 2 for key in KEYS)
        away = next(key for key in KEYS if partition_of(key, 4) >= 2)
        if face.name == "blocking":  # whose calls have a timeout each
            with pytest.raises(BrokerUnavailable):
                await cluster.send(topic, b"", key=away, timeout=0.1)
        brokers[1].start()
        receipt = await cluster.send(topic, b"waits", key=away)
        # others may come again: their acks may have been lost
        while (await drained(consumers, 1))[0].message_id != receipt.message_id:
            pass
    assert await consumers.receive() is None


async def test_a_consumer_may_begin_while_a_broker_is_away(
    face: Face, shared_broker: RealBroker
) -> None:
    cluster = face.connect([NOBODY, shared_broker.url], timeout=AVOIDS_WITHIN_S)
    topic = fresh("t")
    await cluster.clients[1].call("topic.create", name=topic, partitions=1)
    assert [(await cluster.send(topic, b"here")).partition for _ in range(2)] == [0, 0]
    for _ in range(2):  # at least one of them would first go to the broker that is away
        [receipt] = await cluster.send_batch(topic, [Message(b"here")])
        assert receipt.topic == topic
        assert sum(one.count for one in await cluster.send_many(topic, [b"here"] * 2)) == 2
    async with await cluster.consumer(fresh("g"), [topic]) as consumers:
        assert {message.body for message in await drained(consumers, 8)} == {b"here"}
    impatient = face.connect([NOBODY, shared_broker.url], timeout=0.5)
    with pytest.raises(BrokerUnavailable):  # who has the key, only both brokers can tell
        await impatient.send(topic, b"", key="k")
    alone = face.connect([NOBODY], timeout=0.1)
    with pytest.raises(BrokerUnavailable):
        await alone.consumer(fresh("g"), ["t"])
    with pytest.raises(BrokerUnavailable):
        await alone.send("t", b"")


async def test_with_a_map_keys_find_their_partition_without_asking(
    face: Face, shared_broker: RealBroker
) -> None:
    topic = fresh("t")
    cluster = face.connect([NOBODY, shared_broker.url], partition_map={topic: (0, 4)})
    await cluster.clients[1].call("topic.create", name=topic, partitions=4)
    assert (await cluster.send(topic, b"", partition=3)).partition == 3
    receipts = await cluster.send_batch(topic, [Message(b"", key) for key in KEYS])
    assert [receipt.partition for receipt in receipts] == [partition_of(key, 4) for key in KEYS]
    with pytest.raises(LocalProtocolError):
        await cluster.send(topic, b"", partition=4)


@pytest.mark.parametrize("batch", [None, 4])
async def test_handlers_work_on_messages_of_all_brokers_and_failures_go_home(
    face: Face, brokers: list[RealBroker], batch: int | None
) -> None:
    (cluster, topic), seen = await opened(face, brokers, 1), list[str]()
    await cluster.send_batch(topic, [Message(b"", key) for key in KEYS])

    async def handle(handled: Any) -> None:
        messages = handled if batch else [handled]
        await cluster.clients[0].call("topic.list")  # others are at work meanwhile
        seen.extend(message.key for message in messages)
        if any(message.key == "k3" and message.attempt == 1 for message in messages):
            raise ValueError("k3")

    retry = txmq.RetryPolicy((0,), retries=50)
    options: dict[str, Any] = {"workers": 2} | (
        {"batch": batch, "batch_wait": 0.01} if batch else {}
    )
    consumers = await cluster.consumer(fresh("g"), [topic], retry=retry)
    async with face.consuming(consumers, handle, **options):
        await face.until(lambda: consumers.stats.acked == len(KEYS))
    assert set(seen) == set(KEYS)
    assert seen.count("k3") == 2
    assert batch or (len(seen), consumers.stats.nacked) == (len(KEYS) + 1, 1)
    assert consumers.stats.nacked >= 1


async def test_with_an_inbox_messages_at_the_same_place_of_two_brokers_both_take_effect(
    face: Face, brokers: list[RealBroker], database: str
) -> None:
    (cluster, topic), group = await opened(face, brokers, 1), fresh("g")
    connect = with_effects(database)
    bodies = [f"{number}{place}" for number in range(2) for place in range(5)]
    for number, client in enumerate(cluster.clients):
        await client.send_batch(topic, [Message(f"{number}{place}".encode()) for place in range(5)])

    async def handle(message: ReceivedMessage, connection: Any) -> None:
        await face.execute(connection, EFFECT, (message.body.decode(), message.attempt))

    for duplicates in (0, 10):
        consumers = await cluster.consumer(group, [topic])
        async with face.consuming(consumers, handle, inbox=database, workers=2):
            await face.until(lambda: consumers.stats.acked == 10, "all of both brokers")  # noqa: B023  # called at once
        assert consumers.stats.duplicates == duplicates
        for client in cluster.clients:  # as if the acks had been lost
            await client.call("group.reset", group=group, topic=topic, to="first")
    assert effects(connect) == bodies


async def test_a_message_of_another_consumer_is_refused(
    face: Face, brokers: list[RealBroker]
) -> None:
    cluster, topic = await opened(face, brokers, 1)
    await cluster.clients[0].send(topic, b"")
    consumers, others = [await cluster.consumer(fresh("g"), [topic]) for _ in range(2)]
    message = await consumers.receive(PATIENCE_S)
    with pytest.raises(LocalProtocolError):
        await given(others.ack(message))
    with pytest.raises(LocalProtocolError, match="another broker"):
        async with cluster.clients[1].transaction() as tx:
            tx.ack(message)
    await consumers.ack(message, wait=True)
    with pytest.raises(NotLeased):
        consumers.nack(message)


async def test_invalid_arguments_of_connect_are_refused(face: Face, real: RealBroker) -> None:
    with pytest.raises(ConfigError):
        face.connect([])
    with pytest.raises(ConfigError):
        face.connect("txmq://127.0.0.1:1", partition_map={"t": (1,)})
    with pytest.raises(UnknownTopic):
        await face.connect([real.url]).clients[0].call("topic.show", name="nothing")


async def received(reader: Any) -> bytes:
    message = await reader.receive(PATIENCE_S)
    assert message is not None
    body: bytes = message.body
    return body


async def test_one_reader_reads_all_brokers_from_where_it_was(
    face: Face, brokers: list[RealBroker], tmp_path: Path
) -> None:
    cluster, topic = await opened(face, brokers)
    for key in KEYS:
        await cluster.send(topic, key.encode(), key=key)
    async with await cluster.reader("audit", [topic], FileOffsets(tmp_path)) as reader:
        read = [await received(reader) for _ in KEYS[:5]]
        await reader.commit()
    async with await cluster.reader("audit", [topic], FileOffsets(tmp_path)) as reader:
        read += [await received(reader) for _ in KEYS[5:]]
        assert sorted(read) == sorted(key.encode() for key in KEYS)
        assert await reader.receive(0.05) is None
        await cluster.send(topic, b"later", partition=3)
        assert await received(reader) == b"later"
        assert reader.missed == 0
        with pytest.raises(LocalProtocolError, match="one broker"):
            _positions = reader.positions
        with pytest.raises(LocalProtocolError, match="one broker"):
            reader.assign(None)
        with pytest.raises(ConfigError, match="uses this directory"):
            await cluster.reader("audit", [topic], FileOffsets(tmp_path))


async def test_a_reader_goes_on_where_a_broker_comes_back(
    face: Face, brokers: list[RealBroker], tmp_path: Path
) -> None:
    cluster, topic = await opened(face, brokers)
    async with await cluster.reader(
        "audit", [topic], FileOffsets(tmp_path), start="last"
    ) as reader:
        brokers[1].kill()
        await cluster.clients[0].send(topic, b"here")
        assert await received(reader) == b"here"
        brokers[1].start()
        await face.connect(brokers[1].url).send(topic, b"there")
        assert await received(reader) == b"there"


async def test_messages_of_all_brokers_are_found(face: Face, brokers: list[RealBroker]) -> None:
    cluster, topic = await opened(face, brokers)
    sent = [await cluster.send(topic, key.encode(), key=key) for key in KEYS]
    found = [one.message_id async for one in cluster.find(topic)]
    assert sorted(found) == sorted(receipt.message_id for receipt in sent)
    assert [one.body async for one in cluster.find(topic, key="k1")] == [b"k1"]
    at = [
        [one.message_id async for one in cluster.find(topic, partition=number)]
        for number in range(4)
    ]
    assert sorted(chain.from_iterable(at)) == sorted(found)
    if face.name != "blocking":  # which has no `read`
        for number in range(4):
            read = await cluster.read(topic, number, 0)
            assert [message.message_id for message in read.messages] == at[number]
    with pytest.raises(UnknownTopic):
        [one async for one in cluster.find(fresh("none"))]


async def test_a_topic_that_one_broker_has_is_found_there(
    face: Face, brokers: list[RealBroker]
) -> None:
    cluster, topic = face.connect([broker.url for broker in brokers]), fresh("t")
    await cluster.clients[1].send(topic, b"there")
    assert [one.body async for one in cluster.find(topic)] == [b"there"]


async def test_a_delayed_message_is_recalled_wherever_it_is(
    face: Face, brokers: list[RealBroker]
) -> None:
    cluster, topic = await opened(face, brokers)
    for partition in (0, 2):
        receipt = await cluster.send(topic, b"", partition=partition, delay=3_600)
        [waiting] = [one async for one in cluster.find(message_id=receipt)]
        assert waiting.state == "delayed"
        await cluster.recall(receipt)
        await cluster.recall(receipt)
    with pytest.raises(RecallTooLate):
        await cluster.recall(await cluster.send(topic, b""))


async def test_calls_of_one_broker_say_where_they_belong(
    face: Face, brokers: list[RealBroker]
) -> None:
    cluster = face.connect([broker.url for broker in brokers])
    for name, arguments in {"call": ["topic.list"], "xa_resource": ["owner"], "job": []}.items():
        if name == "call" or hasattr(cluster, name):
            with pytest.raises(LocalProtocolError, match=r"cluster\.clients\[0\]"):
                getattr(cluster, name)(*arguments)
    with pytest.raises(LocalProtocolError, match=r"cluster\.clients\[0\]"):
        cluster.log_id()


@pytest.mark.parametrize("face", ["blocking"], indirect=True)
async def test_stats_are_the_sums_over_all_brokers(face: Face, brokers: list[RealBroker]) -> None:
    cluster, topic = await opened(face, brokers)
    for key in KEYS:
        await face.begin_send(cluster, topic, b"", key=key)
    await cluster.flush()
    assert cluster.stats.messages == len(KEYS)
    assert cluster.service == "tests"


def names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


OF_ONE_BROKER = {"assignment", "epoch", "group", "member"}
IN_THREADS = {
    "count",
    "inbox_name",
    "inbox_of",
    "join",
    "parts",
    "settled",
    "start",
    "taken",
    "tell",
}


def test_a_cluster_has_the_calls_of_one_broker() -> None:
    assert names(txmq.twisted.Cluster) - {"clients"} == names(txmq.twisted.Client)
    assert names(Cluster) == names(Client)
    assert names(Consumer) - names(Consumers) - OF_ONE_BROKER == set()
    assert names(txmq.twisted.Reader) == names(txmq.twisted.Readers)


def test_both_faces_can_do_the_same() -> None:
    on_a_reactor = names(txmq.twisted.Consumer)
    assert names(Consumer) - on_a_reactor <= IN_THREADS
    assert on_a_reactor - names(txmq.twisted.Consumers) <= names(Consumer)
