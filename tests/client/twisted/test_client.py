"""The client on Twisted with a real broker, on a reactor of its own in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool

import txmq.twisted
from tests.client.aio.running import bodies, receive
from tests.client.faces.face import TwistedFace
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.real_consumers import busy_log
from tests.client.scripted_member import fresh
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    LocalProtocolError,
    MessageTooLarge,
    NotLeased,
    UnknownGroup,
)
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S
from txmq.twisted import Client, Consumer


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    broker = RealBroker(tmp_path_factory.mktemp("broker"))
    yield broker
    broker.stop()


@pytest.fixture
def client(reactor: Any, broker: RealBroker, in_reactor: InReactor) -> Iterator[Client]:
    client = txmq.twisted.connect(reactor, broker.url, service="tests", timeout=PATIENCE_S)
    yield client

    async def close() -> None:
        await client.close()

    in_reactor(close)


def test_a_message_is_sent_and_read(client: Client, in_reactor: InReactor) -> None:
    async def story() -> None:
        topic = fresh("t")
        receipt = await client.send(topic, b"body", key="k", tag="t", headers={"h": "v"})
        found = await client.read(topic, receipt.partition, 0)
        [message] = found.messages
        assert (message.key, message.tag, message.headers, message.body) == (
            "k",
            "t",
            {"h": "v"},
            b"body",
        )
        assert (message.message_id, message.offset, found.next_offset) == (receipt.message_id, 0, 1)
        assert (await client.read(topic, receipt.partition, 1)).messages == []

    in_reactor(story)


def test_sends_of_one_turn_keep_their_order_and_share_frames(
    client: Client, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic = fresh("t")
        await client.send(topic, b"first", partition=0)
        receipts = [client.send(topic, b"%d" % number, partition=0) for number in range(100)]
        offsets = [(await receipt).offset for receipt in receipts]
        assert offsets == list(range(1, 101))
        assert await bodies(client, topic) == [b"first", *(b"%d" % number for number in range(100))]
        assert client._bridge.at_once(lambda: client._awaited.stats).frames <= 3

    in_reactor(story)


def test_batches_and_columns_are_sent(client: Client, in_reactor: InReactor) -> None:
    async def story() -> None:
        topic = fresh("t")
        receipts = await client.send_batch(topic, [Message(b"a", "k"), Message(b"b", "k")])
        assert [receipt.offset for receipt in receipts] == [0, 1]
        columns = [b"x" * 50_000 for _ in range(100)]
        stored = await client.send_many(topic, columns, keys=["k"] * 100)
        assert stored[0].offset == 2
        assert sum(batch.count for batch in stored) == 100
        shown = await client.call("topic.show", name=topic)
        assert sum(shown["ends"]) == 102

    in_reactor(story)


def test_a_refusal_of_the_broker_or_the_client_fails_the_call(
    client: Client, in_reactor: InReactor
) -> None:
    async def story() -> None:
        with pytest.raises(UnknownGroup):
            await client.call("group.show", group=fresh("g"))
        with pytest.raises(MessageTooLarge):
            await client.send(fresh("t"), b"x" * (5 << 20))

    in_reactor(story)


def test_without_a_broker_calls_fail_in_time(reactor: Any, in_reactor: InReactor) -> None:
    async def story() -> None:
        client = txmq.twisted.connect(reactor, "txmq://127.0.0.1:1", timeout=0.2)
        with pytest.raises(BrokerUnavailable):
            await client.send("t", b"x")
        with pytest.raises(BrokerUnavailable):
            await client.consumer("g", ["t"])
        await client.close()
        with pytest.raises(ClientClosed):
            await client.call("topic.list")

    in_reactor(story)


def test_columns_survive_a_topic_that_grows(client: Client, in_reactor: InReactor) -> None:
    async def story() -> None:
        topic = fresh("t")
        await client.call("topic.create", name=topic, partitions=1)
        await client.send(topic, b"0", key="k0")
        await client.call("topic.grow", name=topic, partitions=8)
        keys = [f"k{number}" for number in range(40)]
        stored = await client.send_many(topic, [b"x"] * 40, keys=keys)
        assert sum(batch.count for batch in stored) == 40
        assert len({batch.partition for batch in stored}) > 1

    in_reactor(story)


def test_a_read_waits_for_messages_and_can_be_cancelled(
    client: Client, reactor: Any, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic = fresh("t")
        await client.call("topic.create", name=topic, partitions=1)
        waiting = client.read(topic, 0, 0, wait=PATIENCE_S)
        await client.send(topic, b"x")
        assert [message.body for message in (await waiting).messages] == [b"x"]
        waiting = client.read(topic, 0, 1, wait=PATIENCE_S)
        await deferLater(reactor, 0.01)
        waiting.cancel()
        with pytest.raises(CancelledError):
            await waiting
        assert (await client.call("topic.show", name=topic))["ends"] == [1]

    in_reactor(story)


def test_a_transaction_is_all_or_nothing(client: Client, in_reactor: InReactor) -> None:
    async def story() -> None:
        topic, group = fresh("t"), fresh("g")
        await client.send(topic, b"in", partition=0)
        consumer = await client.consumer(group, [topic])
        [message] = [await consumer.receive()]
        assert message is not None
        with suppress(ZeroDivisionError):
            async with client.transaction() as tx:
                tx.ack(message)
                tx.send(topic, b"never", partition=0)
                raise ZeroDivisionError
        async with client.transaction() as tx:
            tx.ack(message)
            tx.send(topic, b"one", partition=0)
            tx.send(topic, b"two", partition=0)
        assert [receipt.message_id for receipt in await tx.receipts()] == [
            f"{tx.token.hex}-{n}" for n in range(2)
        ]
        assert await bodies(client, topic) == [b"in", b"one", b"two"]
        with pytest.raises(NotLeased):
            await consumer.ack(message, wait=True)
        assert [other.body for other in await receive(consumer, 2)] == [b"one", b"two"]

    in_reactor(story)


def test_a_consumer_iterates_until_it_is_closed_and_gives_the_rest_back(
    client: Client, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic, group = fresh("t"), fresh("g")
        await client.send_batch(topic, [Message(b"%d" % number) for number in range(10)])
        consumer = await client.consumer(group, [topic])
        seen = []
        async for message in consumer:
            seen.append(message.body)
            await consumer.ack(message, wait=True)
            if len(seen) == 4:
                await consumer.close()
        other = await client.consumer(group, [topic])
        rest = await receive(other, 6)
        assert sorted([*seen, *(message.body for message in rest)]) == [
            b"%d" % number for number in range(10)
        ]
        assert {message.attempt for message in rest} == {1}

    in_reactor(story)


def test_a_failed_message_comes_again_and_batches_come_as_columns(
    client: Client, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic, group = fresh("t"), fresh("g")
        await client.send_batch(topic, [Message(b"%d" % number, "k") for number in range(3)])
        consumer = await client.consumer(group, [topic], mode="ordered")
        first = await consumer.receive()
        assert first is not None
        consumer.nack(first, delay=0.0, error="later")
        assert [(one.body, one.attempt) for one in await receive(consumer, 3)] == [
            (b"0", 2),
            (b"1", 1),
            (b"2", 1),
        ]
        await client.send_many(topic, [b"x", b"y"], keys=["k", "k"])
        batches = await client.consumer(fresh("g"), [topic], start="first")
        seen: list[bytes] = []
        async for batch in batches.batches():
            seen += batch.bodies
            batches.ack_batch(batch)
            if len(seen) == 5:
                await batches.close()
        assert seen == [b"0", b"1", b"2", b"x", b"y"]

    in_reactor(story)


def test_a_restarted_broker_is_survived_by_sends_and_consumers(
    reactor: Any, in_reactor: InReactor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broker = RealBroker(tmp_path_factory.mktemp("restarted"))
    client = txmq.twisted.connect(
        reactor, broker.url, timeout=PATIENCE_S, delivery_timeout=PATIENCE_S
    )
    kept: list[Consumer] = []

    async def before() -> None:
        kept.append(await client.consumer("g", ["t"]))
        await client.send("t", b"0", key="k")
        message = await kept[0].receive()
        assert message is not None
        await kept[0].ack(message, wait=True)

    async def after() -> None:
        await client.send("t", b"1", key="k")
        [message] = await receive(kept[0], 1)
        assert message.body == b"1"
        assert kept[0].stats.rejoined == 1
        await client.close()

    try:
        in_reactor(before)
        broker.kill()
        broker.start()
        in_reactor(after)
    finally:
        broker.stop()


async def _runs_until_cancelled(consumer: Consumer, handler: Any, begun: Deferred[None]) -> None:
    run = consumer.run(handler)
    await begun
    run.cancel()
    with pytest.raises(CancelledError):
        await run


@pytest.mark.parametrize("mode", ["concurrent", "ordered"])
def test_a_cancelled_run_cancels_its_handlers_and_their_messages_come_again(
    reactor: Any, client: Client, in_reactor: InReactor, mode: Any
) -> None:
    topic, seen = fresh("t"), list[tuple[bytes, int]]()

    def handle(message: ReceivedMessage) -> None:
        seen.append((message.body, message.attempt))

    async def story() -> None:
        await client.send_batch(topic, [Message(b"%d" % number, "k") for number in range(3)])
        consumer = await client.consumer(fresh("g"), [topic], mode=mode)
        begun: Deferred[None] = Deferred()

        def hang(_message: ReceivedMessage) -> Deferred[None]:
            begun.callback(None)
            return Deferred()

        await _runs_until_cancelled(consumer, hang, begun)
        await TwistedFace(reactor).drain(client, consumer, handle)
        assert consumer.stats.nacked == 0

    in_reactor(story)
    assert sorted(seen) == [(b"0", 1), (b"1", 1), (b"2", 1)]
    assert mode == "concurrent" or seen == sorted(seen), "the order of the key"


def test_a_generator_is_refused_and_work_left_in_a_result_fails_its_message(
    reactor: Any, client: Client, in_reactor: InReactor
) -> None:
    def generate(_message: ReceivedMessage) -> Iterator[None]:
        yield

    def indirectly(message: ReceivedMessage) -> object:
        return generate(message)

    async def story() -> None:
        topic = fresh("t")
        await client.send(topic, b"x")
        policy = RetryPolicy((0,), retries=0)
        consumer = await client.consumer(fresh("g"), [topic], retry=policy)
        with pytest.raises(LocalProtocolError, match="generate is a generator"):
            await consumer.run(generate)
        await TwistedFace(reactor).drain(client, consumer, indirectly)
        assert (consumer.stats.nacked, consumer.stats.acked) == (1, 0)

    in_reactor(story)


def test_a_key_keeps_its_order_when_a_nack_follows_a_restart_on_a_reactor(
    tmp_path: Path, reactor: Any, in_reactor: InReactor
) -> None:
    broker = RealBroker(tmp_path)
    client = txmq.twisted.connect(reactor, broker.url, timeout=PATIENCE_S)

    async def in_thread(function: Callable[[], object]) -> None:
        await deferToThreadPool(reactor, reactor.getThreadPool(), function)

    async def acked() -> None:
        while (await client.call("group.show", group="g"))["leased"]:
            pass

    async def story() -> None:
        consumer = await client.consumer("g", ["t"], mode="ordered", retry=RetryPolicy((0,)))
        for _ in range(5):
            await client.send_batch("t", [Message(b"%d" % number, "k") for number in range(3)])
            in_hand = await consumer.receive()
            assert in_hand is not None
            await in_thread(broker.kill)
            consumer.nack(in_hand, error="failed")
            await in_thread(broker.start)
            received = await receive(consumer, 3)
            assert [message.body for message in received] == [b"0", b"1", b"2"]
            await acked()  # what is not acked when the broker dies comes again
        await client.close()

    try:
        with busy_log(broker.url):
            in_reactor(story)
    finally:
        broker.stop()
