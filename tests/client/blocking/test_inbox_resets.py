"""Handlers with an inbox, and operators who reset, skip and delete their groups."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import txmq
from tests.client.effects import effects, have_come, take_effect, with_effects
from tests.client.real_consumers import drain
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.session import Connection

Connect = Callable[[], Connection]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    with OwnBroker(tmp_path_factory.mktemp("broker"), "[retention]\nevery_s = 0.1\n") as broker:
        yield broker


@pytest.fixture
def client(broker: OwnBroker) -> Iterator[Client]:
    with txmq.connect(broker.url, service="tests", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def connect(database: str) -> Connect:
    return with_effects(database)


def send(client: Client, topic: str, *bodies: str) -> None:
    client.send_batch(topic, [Message(body.encode(), "k") for body in bodies])


def consumer_of(client: Client, group: str, *topics: str) -> Consumer:
    return client.consumer(group, list(topics), retry=RetryPolicy((0,), retries=50))


def run(client: Client, connect: Connect, group: str, *topics: str, count: int) -> None:
    """Run a consumer until there are so many effects, and nothing more to come.

    Where nothing is to come, a message that is sent before shows that the inbox was
    opened and what it lacks was asked for.
    """
    with consumer_of(client, group, *topics) as consumer:
        drain(client, consumer, take_effect, have_come(connect, count), inbox=connect)


@contextmanager
def running(
    client: Client,
    connect: Connect,
    group: str,
    *topics: str,
    handler: Callable[[ReceivedMessage, Connection], None] = take_effect,
) -> Iterator[Consumer]:
    """Run a consumer in a thread."""
    stop = threading.Event()
    with consumer_of(client, group, *topics) as consumer:
        thread = threading.Thread(
            target=consumer.run, args=(handler,), kwargs={"inbox": connect, "stop": stop}
        )
        thread.start()
        try:
            yield consumer
        finally:
            stop.set()
            thread.join()


class Holding:
    """A handler that keeps the first message with that body in hand until `release`."""

    def __init__(self, body: str) -> None:
        self._body = body
        self.in_hand, self.release = threading.Event(), threading.Event()
        self.runs = Counter[str]()

    def __call__(self, message: ReceivedMessage, connection: Connection) -> None:
        body = message.body.decode()
        self.runs[body] += 1
        take_effect(message, connection)
        if body == self._body and self.runs[body] == 1:
            self.in_hand.set()
            self.release.wait(PATIENCE_S)


def all_taken(connect: Connect, wanted: list[str]) -> None:
    wait_until(lambda: effects(connect) == sorted(wanted), what="all took effect")


def test_a_reprocess_beside_a_running_consumer_acts_at_once_and_on_its_topic_alone(
    client: Client, connect: Connect
) -> None:
    first, second, group = fresh("t"), fresh("u"), fresh("g")
    handle = Holding("b")

    with running(client, connect, group, first, second, handler=handle):
        send(client, first, "a0", "a1")
        all_taken(connect, ["a0", "a1"])
        send(client, second, "b")
        assert handle.in_hand.wait(PATIENCE_S)
        client.call("group.reset", group=group, topic=first, to="first", reprocess=True)
        handle.release.set()
        all_taken(connect, ["a0", "a1"] * 2 + ["b"])
        client.call("group.reset", group=group, topic=first, to="first", reprocess=True)
        all_taken(connect, ["a0", "a1"] * 3 + ["b"])
    send(client, first, "c")
    send(client, second, "d")
    run(client, connect, group, first, second, count=9)
    assert effects(connect) == sorted(["a0", "a1"] * 3 + ["b", "c", "d"])


def test_a_handler_that_a_reprocess_overtakes_does_not_settle_the_message(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    handle = Holding("a")

    with running(client, connect, group, topic, handler=handle) as consumer:
        send(client, topic, "a")
        assert handle.in_hand.wait(PATIENCE_S)
        client.call("group.reset", group=group, topic=topic, to="first", reprocess=True)
        wait_until(lambda: consumer.epoch == 2, what="the member knows")
        handle.release.set()
        wait_until(lambda: client.call("group.show", group=group)["unsettled"] == 0, what="no lag")
    assert effects(connect) == ["a"]
    assert handle.runs["a"] == 2


def test_a_group_deleted_and_made_again_after_a_reprocess_doubles_nothing(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    send(client, topic, "a", "b")
    run(client, connect, group, topic, count=2)
    client.call("group.reset", group=group, topic=topic, to="first", reprocess=True)
    run(client, connect, group, topic, count=4)
    assert effects(connect) == ["a", "a", "b", "b"]
    client.call("group.delete", group=group)
    send(client, topic, "c")
    run(client, connect, group, topic, count=5)
    assert effects(connect) == ["a", "a", "b", "b", "c"]
    assert client.call("group.show", group=group)["epoch"] == 2


def test_what_was_not_to_be_processed_again_has_one_effect_after_a_reset_back(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    send(client, topic, "a", "b", "c", "d")
    run(client, connect, group, topic, count=4)
    client.call("group.reset", group=group, topic=topic, to={"0": 2}, reprocess=True)
    run(client, connect, group, topic, count=6)
    client.call("group.reset", group=group, topic=topic, to="first")
    send(client, topic, "e")
    run(client, connect, group, topic, count=7)
    assert effects(connect) == ["a", "b", "c", "c", "d", "d", "e"]


def test_what_an_operator_skipped_is_not_applied_after_all(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    send(client, topic, "a")
    run(client, connect, group, topic, count=1)
    send(client, topic, "b", "c", "d")
    client.call("group.reset", group=group, topic=topic, to={"0": 3})
    run(client, connect, group, topic, count=2)
    send(client, topic, "e")
    client.call("group.reset", group=group, topic=topic, to="last")
    for count, body in enumerate("fg", 3):
        send(client, topic, body)
        run(client, connect, group, topic, count=count)
    assert effects(connect) == ["a", "d", "f", "g"]


def test_a_skip_beside_a_running_consumer_skips_what_it_has_prefetched(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    handle = Holding("a")

    client.call("topic.create", name=topic, partitions=1)
    send(client, topic, "a", "b", "c")
    with running(client, connect, group, topic, handler=handle) as consumer:
        assert handle.in_hand.wait(PATIENCE_S)
        client.call("group.reset", group=group, topic=topic, to="last")
        generation = client.call("group.show", group=group)["generation"]
        membership = consumer._members.members[0].member
        wait_until(
            lambda: (
                membership.membership is not None and membership.membership.generation == generation
            ),
            what="the member knows",
        )
        handle.release.set()
        send(client, topic, "d")
        all_taken(connect, ["d"])


def test_expired_messages_and_letters_do_not_come_again(client: Client, connect: Connect) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    client.send_batch(topic, [Message(b"short", ttl=0.001)])
    send(client, topic, "dead", "last")

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        if message.body == b"dead":
            raise ValueError("never")

    def once(count: int) -> None:
        with client.consumer(group, [topic], retry=RetryPolicy((0,), retries=1)) as consumer:
            drain(client, consumer, handle, have_come(connect, count), inbox=connect)

    once(1)
    assert client.call("group.show", group=group)["letters"] == 1
    client.call("topic.alter", name=topic, letters_ms=1)
    wait_until(lambda: client.call("group.show", group=group)["letters"] == 0, what="it expires")
    before = client.call("group.show", group=group)["expired"]
    for count, body in enumerate(("later", "latest"), 2):
        send(client, topic, body)
        once(count)
    assert effects(connect) == ["last", "later", "latest"]
    shown = client.call("group.show", group=group)
    assert (shown["expired"], shown["letters"]) == (before, 0)


def test_retention_that_passes_a_slow_group_is_no_loss_of_the_database(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    send(client, topic, "a")
    run(client, connect, group, topic, count=1)
    send(client, topic, "b")
    client.call("topic.alter", name=topic, retention_ms=1)
    wait_until(lambda: client.call("topic.show", name=topic)["firsts"] == [2], what="both are gone")
    client.call("topic.alter", name=topic, retention_ms=0)
    send(client, topic, "c")
    run(client, connect, group, topic, count=2)
    assert effects(connect) == ["a", "c"]
    names = {alarm["name"] for alarm in client.call("broker.alarms")["alarms"]}
    assert "inbox.lost" not in names
