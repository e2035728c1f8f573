"""Consumers that pause a topic, or all, and resume."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import txmq
import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.consumer import Consumer, Consumers
from txmq.client.protocol.consumer import fetcher
from txmq.errors import LocalProtocolError
from txmq.model.message import ReceivedMessage
from txmq.testing.wait import PATIENCE_S, wait_until

A_MOMENT_S = 0.3
POLL_S = 60.0  # the longest that a broker waits with its answer


@pytest.fixture(autouse=True)
def long_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let polls be much longer than a busy machine stands still."""
    monkeypatch.setattr(fetcher, "FETCH_WAIT_S", POLL_S)


@pytest.fixture
def topics(client: Client) -> list[str]:
    """Two with ten messages each."""
    names = [fresh("a"), fresh("b")]
    for name in names:
        client.call("topic.create", name=name, partitions=1)
        client.send_many(name, [name.encode()] * 10)
    return names


def received(consumer: Consumer | Consumers, topic: str) -> ReceivedMessage:
    """The next message, which is of that topic."""
    message = consumer.receive(PATIENCE_S)
    assert message is not None
    assert message.topic == topic
    return message


def settled(client: Client, group: str, topic: str) -> int:
    """Messages of the topic that the group has done with."""
    positions = client.call("group.show", group=group)["positions"]
    return sum(place["floor"] for place in positions if place["topic"] == topic)


def reasons(client: Client, group: str, topic: str) -> set[str]:
    """Why nothing of the topic comes to the group."""
    positions = client.call("group.show", group=group)["positions"]
    return {place["reason"] for place in positions if place["topic"] == topic}


def test_only_the_other_topic_comes_until_the_resume_and_no_attempt_is_counted(
    client: Client, topics: list[str]
) -> None:
    one, other = topics
    with client.consumer(fresh("g"), topics) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        paused = message.topic  # whichever comes first
        consumer.pause(paused)
        assert consumer.paused == {paused}
        consumer.ack(message)
        for _ in range(10):
            consumer.ack(received(consumer, one if paused == other else other))
        client.send(paused, b"later")
        assert consumer.receive(A_MOMENT_S) is None
        wait_until(
            lambda: reasons(client, consumer.group, paused) == {"member-paused"},
            what="the broker is told of the pause",
        )
        consumer.resume(paused)
        assert consumer.paused == frozenset()
        came = [consumer.receive(PATIENCE_S) for _ in range(10)]
    assert [(message.topic, message.attempt) for message in came if message] == [(paused, 1)] * 10


def test_a_resumed_topic_is_fetched_at_once_though_a_long_poll_waits(
    client: Client, topics: list[str]
) -> None:
    one, other = topics
    with client.consumer(fresh("g"), topics) as consumer:
        consumer.pause(one)
        for _ in range(10):
            consumer.ack(received(consumer, other), wait=True)
        consumer.resume(one)
        batch = consumer.receive_batch(POLL_S - 10)
        assert batch is not None
        assert batch.topic == one


def test_handlers_get_nothing_of_a_paused_topic_and_each_resume_undoes_its_own_pause(
    client: Client, topics: list[str]
) -> None:
    one, other = topics
    seen, stop = list[str](), threading.Event()

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.topic)

    with client.consumer(fresh("g"), topics, mode="ordered") as consumer:
        consumer.pause(one)
        consumer.pause()
        assert consumer.paused == {one, other}
        thread = threading.Thread(
            target=consumer.run, args=(handle,), kwargs={"stop": stop, "workers": 2}
        )
        thread.start()
        consumer.resume()
        assert consumer.paused == {one}
        wait_until(lambda: settled(client, consumer.group, other) == 10)
        assert seen == [other] * 10
        consumer.resume(one)
        wait_until(lambda: settled(client, consumer.group, one) == 10)
        stop.set()
        thread.join()
    assert seen == [other] * 10 + [one] * 10


@pytest.mark.parametrize("name", ["unheard-of", ""])
def test_a_topic_that_the_consumer_does_not_read_is_refused(
    client: Client, topics: list[str], name: str
) -> None:
    with client.consumer(fresh("g"), topics) as consumer:
        for change in (consumer.pause, consumer.resume):
            with pytest.raises(LocalProtocolError, match="does not read") as refused:
                change(topics[0], name)
            assert refused.value.hint == f"use one of its topics: {', '.join(topics)}"
        assert consumer.paused == frozenset()


def test_pauses_work_on_twisted(
    shared_broker: RealBroker, topics: list[str], reactor: Any, in_reactor: InReactor
) -> None:
    one, other = topics

    async def story() -> None:
        client = txmq.twisted.connect(
            reactor, shared_broker.url, service="tests", timeout=PATIENCE_S
        )
        consumer = await client.consumer(fresh("g"), topics)
        consumer.pause(one)
        assert consumer.paused == {one}
        for _ in range(10):
            message = await consumer.receive(PATIENCE_S)
            assert message is not None
            assert message.topic == other
            consumer.ack(message)
        assert await consumer.receive(A_MOMENT_S) is None
        consumer.resume(one)
        batch = await consumer.receive_batch(POLL_S - 10)
        assert batch is not None
        assert batch.topic == one
        with pytest.raises(LocalProtocolError, match="does not read"):
            consumer.pause("unheard-of")
        await client.close()

    in_reactor(story)


def test_pauses_work_at_all_of_several_brokers(
    shared_broker: RealBroker, deciding: RealBroker, topics: list[str]
) -> None:
    one, other = topics
    with txmq.connect(
        [shared_broker.url, deciding.url], service="tests", timeout=PATIENCE_S
    ) as cluster:
        second = cluster.clients[1]
        for name in topics:
            second.call("topic.create", name=name, partitions=1)
            second.send_many(name, [name.encode()] * 10)
        with cluster.consumer(fresh("g"), topics) as consumers:
            consumers.pause(one)
            assert consumers.paused == {one}
            for _ in range(20):
                consumers.ack(received(consumers, other))
            consumers.resume(one)
            for _ in range(20):
                consumers.ack(received(consumers, one))
