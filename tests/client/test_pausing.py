"""A consumer that stops taking messages of a topic for a while, or of all, and goes
on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import txmq
import txmq.twisted
from tests.client.consuming import Spoken, chunk, fresh
from tests.client.real import RealBroker
from tests.client.telling import Tell
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.cluster import Consumers
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.errors import LocalProtocolError
from txmq.model.message import ReceivedMessage
from txmq.testing.wait import wait_until

WAIT_S = 20.0
A_MOMENT_S = 0.3


def two_topics(**options: Any) -> Spoken:
    return Spoken(topics=["orders", "refunds"], **options).joined()


def test_a_paused_member_gives_back_what_waits_and_goes_on_later() -> None:
    spoken = Spoken().joined().fetched(chunk(*"abc"))
    [message] = spoken.take()
    spoken.ask()
    spoken.member.pause(paused=True)
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 1, 3]]
    assert spoken.asked("consumer.heartbeat")["paused"] == ["orders"]
    assert spoken.take() == []
    spoken.answer("consumer.return", stale=[])
    spoken.fetched(chunk("d", at=3))
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 3, 4]]
    assert spoken.hands.ack(message, spoken.now) != 0
    assert "fetch" not in spoken.names()
    spoken.member.pause(paused=False)
    assert "fetch" in spoken.names()


def test_of_a_paused_topic_nothing_is_kept_or_asked_for_and_of_others_all() -> None:
    spoken = two_topics().fetched(chunk(*"ab"), chunk(*"cd", topic="refunds"))
    spoken.ask()
    spoken.member.pause(["orders"], paused=True)
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 0, 2]]
    assert spoken.asked("consumer.heartbeat")["paused"] == ["orders"]
    assert [message.body for message in spoken.take(9)] == [b"c", b"d"]
    assert [asked.args.without for asked in spoken.ask() if asked.name == "fetch"] == [
        (),
        ("orders",),
    ]


def test_what_was_under_way_of_a_topic_as_it_was_paused_is_given_back() -> None:
    spoken = two_topics()
    spoken.ask()
    spoken.member.pause(["orders"], paused=True)
    spoken.fetched(chunk("a"), chunk("b", topic="refunds"))
    assert spoken.asked("consumer.return")["ranges"] == [["orders", 0, 0, 1]]
    assert [message.body for message in spoken.take(9)] == [b"b"]


def test_no_more_than_two_fetches_are_under_way_however_often_it_changes_its_mind() -> None:
    spoken = two_topics()
    for paused in (True, False, True, False, True):
        spoken.member.pause(["orders"], paused=paused)
        assert spoken.names().count("fetch") <= 2
    spoken.fetched()
    assert [asked.args.without for asked in spoken.ask() if asked.name == "fetch"] == [
        (),
        ("orders",),
    ]


def test_with_all_its_topics_paused_it_asks_for_nothing() -> None:
    spoken = two_topics().fetched()
    spoken.member.pause(["orders", "refunds"], paused=True)
    assert "fetch" not in spoken.names()
    assert spoken.member.wake_at() is not None, "it has heartbeats"


def test_a_pause_outlives_connections_and_the_broker_is_told_anew() -> None:
    spoken = two_topics()
    spoken.member.pause(["refunds"], paused=True)
    spoken.lost()
    spoken.joined()
    assert spoken.asked("fetch").without == ("refunds",)
    assert spoken.asked("consumer.heartbeat")["paused"] == ["refunds"]


@pytest.fixture
def client(shared_broker: RealBroker) -> Iterator[Client]:
    with txmq.connect(shared_broker.url, service="tests", timeout=WAIT_S) as client:
        yield client


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
    message = consumer.receive(WAIT_S)
    assert message is not None
    assert message.topic == topic
    return message


def settled(client: Client, group: str, topic: str) -> int:
    """Messages of the topic that the group has done with."""
    positions = client.call("group.show", group=group)["positions"]
    return sum(place["floor"] for place in positions if place["topic"] == topic)


def test_only_the_other_topic_comes_until_it_goes_on_and_no_attempt_was_counted(
    client: Client, topics: list[str]
) -> None:
    one, other = topics
    with client.consumer(fresh("g"), topics) as consumer:
        message = consumer.receive(WAIT_S)
        assert message is not None
        paused = message.topic  # whichever comes first
        consumer.pause(paused)
        assert consumer.paused == {paused}
        consumer.ack(message)
        for _ in range(10):
            consumer.ack(received(consumer, one if paused == other else other))
        client.send(paused, b"later")
        assert consumer.receive(A_MOMENT_S) is None
        shown = client.call("group.show", group=consumer.group)
        assert {place["reason"] for place in shown["positions"] if place["topic"] == paused} == {
            "member-paused"
        }
        consumer.resume(paused)
        assert consumer.paused == frozenset()
        came = [consumer.receive(WAIT_S) for _ in range(10)]
    assert [(message.topic, message.attempt) for message in came if message] == [(paused, 1)] * 10


def test_a_topic_that_goes_on_is_fetched_at_once_though_a_long_poll_waits(
    client: Client, topics: list[str]
) -> None:
    one, other = topics
    with client.consumer(fresh("g"), topics) as consumer:
        consumer.pause(one)
        for _ in range(10):
            consumer.ack(received(consumer, other), wait=True)
        consumer.resume(one)
        batch = consumer.receive_batch(15.0)  # a poll waits for 20 s
        assert batch is not None
        assert batch.topic == one


def test_handlers_get_nothing_of_a_paused_topic_and_pauses_undo_each_their_own(
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
            target=consumer.run, args=(handle,), kwargs={"stop": stop, "threads": 2}
        )
        thread.start()
        consumer.resume()
        assert consumer.paused == {one}
        wait_until(lambda: settled(client, consumer.group, other) == 10, WAIT_S)
        assert seen == [other] * 10
        consumer.resume(one)
        wait_until(lambda: settled(client, consumer.group, one) == 10, WAIT_S)
        stop.set()
        thread.join(WAIT_S)
    assert seen == [other] * 10 + [one] * 10


@pytest.mark.parametrize("name", ["unheard-of", ""])
def test_a_topic_that_it_does_not_read_is_refused_with_those_that_it_does(
    client: Client, topics: list[str], name: str
) -> None:
    with client.consumer(fresh("g"), topics) as consumer:
        for change in (consumer.pause, consumer.resume):
            with pytest.raises(LocalProtocolError, match="does not read") as refused:
                change(topics[0], name)
            assert refused.value.hint == f"one of those that it reads: {', '.join(topics)}"
        assert consumer.paused == frozenset()


def test_on_twisted_too(
    shared_broker: RealBroker, topics: list[str], reactor: Any, tell: Tell
) -> None:
    one, other = topics

    async def story() -> None:
        client = txmq.twisted.connect(reactor, shared_broker.url, service="tests", timeout=WAIT_S)
        consumer = await client.consumer(fresh("g"), topics)
        consumer.pause(one)
        assert consumer.paused == {one}
        for _ in range(10):
            message = await consumer.receive(WAIT_S)
            assert message is not None
            assert message.topic == other
            consumer.ack(message)
        assert await consumer.receive(A_MOMENT_S) is None
        consumer.resume(one)
        batch = await consumer.receive_batch(15.0)
        assert batch is not None
        assert batch.topic == one
        with pytest.raises(LocalProtocolError, match="does not read"):
            consumer.pause("unheard-of")
        await client.close()

    tell(story)


def test_at_several_brokers_at_all_of_them(
    shared_broker: RealBroker, deciding: RealBroker, topics: list[str]
) -> None:
    one, other = topics
    with txmq.connect(
        [shared_broker.url, deciding.url], service="tests", timeout=WAIT_S
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
