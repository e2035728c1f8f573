"""Attempts in place, with and without an inbox."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

import txmq
from tests.client.effects import effects, take_effect, with_effects
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.tx.postgres.session import Connection

WAIT_S = 20.0
IDLE_S = 2.0  # much longer than a busy machine stands still


@pytest.fixture
def client(shared_broker: RealBroker) -> Iterator[Client]:
    with txmq.connect(shared_broker.url, service="tests", timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def connect(database: str) -> Callable[[], Connection]:
    return with_effects(database)


def send(client: Client, topic: str, count: int = 3) -> list[str]:
    bodies = [f"m{number:02}" for number in range(count)]
    client.send_batch(topic, [Message(body.encode(), "key") for body in bodies])
    return bodies


class Failing:
    """Attempts at messages, of which the first ones fail."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self._failures, self._error = failures, error or KeyError("k")
        self.attempts: list[tuple[str, int]] = []

    def attempt(self, message: ReceivedMessage) -> None:
        self.attempts.append((message.body.decode(), message.attempt))
        if len(self.attempts) <= self._failures:
            raise self._error


def test_a_message_is_handled_again_in_place_and_its_key_waits(client: Client) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing(2)
    bodies = send(client, topic)
    with client.consumer(group, [topic], mode="ordered", attempts_in_place=3) as consumer:
        consumer.run(failing.attempt, threads=2, idle_exit=IDLE_S)
        assert (consumer.stats.retried, consumer.stats.nacked) == (2, 0)
    assert failing.attempts == [("m00", 1)] * 2 + [(body, 1) for body in bodies]


def test_together_they_are_one_attempt_for_the_broker(client: Client) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing(100)
    send(client, topic, 1)
    retry = RetryPolicy.table(0, attempts=1)
    with client.consumer(group, [topic], retry=retry, attempts_in_place=2) as consumer:
        consumer.run(failing.attempt, idle_exit=IDLE_S)
    assert [attempt for _body, attempt in failing.attempts] == [1, 1, 2, 2]
    [letter] = client.call("dlq.list", group=group)["letters"]
    assert "(attempt 2 of 2 in place)" in letter["error_text"]


def test_a_list_is_handled_again_as_a_whole(client: Client) -> None:
    topic, group, calls = fresh("t"), fresh("g"), list[int]()
    send(client, topic)

    def handle(messages: Sequence[ReceivedMessage]) -> None:
        calls.append(len(messages))
        if len(calls) == 1:
            raise KeyError("k")

    with client.consumer(group, [topic], mode="ordered", attempts_in_place=2) as consumer:
        consumer.run(handle, batch=3, batch_wait=5.0, idle_exit=IDLE_S)
        assert (consumer.stats.acked, consumer.stats.retried) == (3, 3)
    assert calls == [3, 3]


def test_a_dead_error_ends_them(client: Client) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing(1, ValueError("v"))
    send(client, topic, 1)
    retry = RetryPolicy.table(0, dead=["ValueError"])
    with client.consumer(group, [topic], retry=retry, attempts_in_place=5) as consumer:
        consumer.run(failing.attempt, idle_exit=IDLE_S)
        assert consumer.stats.dead_lettered == 1
    assert len(failing.attempts) == 1


def test_the_end_of_the_consume_timeout_ends_them(client: Client) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing(100)
    send(client, topic, 1)
    retry = RetryPolicy.table(0, attempts=0)
    with client.consumer(
        group, [topic], retry=retry, attempts_in_place=1_000, consume_timeout_s=3
    ) as consumer:
        consumer.run(failing.attempt, idle_exit=2.0)
        assert (consumer.stats.nacked, consumer.stats.dead_lettered) == (1, 1)
    assert 1 < len(failing.attempts) < 10


def test_a_stop_ends_them_with_a_nack(client: Client) -> None:
    topic, group, stop = fresh("t"), fresh("g"), threading.Event()
    send(client, topic, 1)

    def fail(_message: ReceivedMessage) -> None:
        stop.set()
        raise KeyError("k")

    with client.consumer(group, [topic], attempts_in_place=1_000) as consumer:
        consumer.run(fail, stop=stop)
    assert consumer.stats.nacked == 1


def test_each_attempt_has_a_transaction_of_its_own_with_an_inbox(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing(2)
    bodies = send(client, topic)

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        failing.attempt(message)

    with client.consumer(group, [topic], mode="ordered", attempts_in_place=3) as consumer:
        consumer.run(handle, inbox=connect, idle_exit=IDLE_S)
        assert (consumer.stats.retried, consumer.stats.nacked) == (2, 0)
    assert effects(connect) == bodies
    assert len(failing.attempts) == 5


def test_messages_of_a_failed_list_are_each_tried_in_place_with_an_inbox(
    client: Client, connect: Callable[[], Connection]
) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing(2)
    bodies = send(client, topic)

    def handle(messages: Sequence[ReceivedMessage], connection: Connection) -> None:
        for message in messages:
            take_effect(message, connection)
        failing.attempt(messages[0])

    with client.consumer(group, [topic], mode="ordered", attempts_in_place=2) as consumer:
        consumer.run(handle, inbox=connect, batch=3, batch_wait=5.0, idle_exit=IDLE_S)
        assert (consumer.stats.retried, consumer.stats.nacked) == (1, 0)
    assert effects(connect) == bodies
