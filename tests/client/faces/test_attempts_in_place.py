"""Attempts in place, with and without an inbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.client.effects import EFFECT, effects, with_effects
from tests.client.faces.face import Face
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S


async def consumer_of(client: Any, group: str, count: int, **options: Any) -> tuple[Any, list[str]]:
    """Return a consumer of so many messages of one key, and their bodies."""
    topic, bodies = fresh("t"), [f"m{number:02}" for number in range(count)]
    await client.send_batch(topic, [Message(body.encode(), "key") for body in bodies])
    return await client.consumer(group, [topic], **options), bodies


class Failing:
    """Attempts at messages, of which the first ones fail."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self._failures, self._error = failures, error or KeyError("k")
        self.attempts: list[tuple[str, int]] = []

    async def attempt(self, message: ReceivedMessage) -> None:
        self.attempts.append((message.body.decode(), message.attempt))
        if len(self.attempts) <= self._failures:
            raise self._error


async def test_a_message_is_handled_again_in_place_and_its_key_waits(
    face: Face, real: RealBroker
) -> None:
    failing, options = Failing(2), {"mode": "ordered", "attempts_in_place": 3}
    consumer, bodies = await consumer_of(face.connect(real.url), fresh("g"), 3, **options)
    async with face.consuming(consumer, failing.attempt, workers=2):
        await face.until(lambda: consumer.stats.acked == 3)
    assert (consumer.stats.retried, consumer.stats.nacked) == (2, 0)
    assert failing.attempts == [("m00", 1)] * 2 + [(body, 1) for body in bodies]


async def test_together_they_are_one_attempt_for_the_broker(face: Face, real: RealBroker) -> None:
    client, group, failing = face.connect(real.url), fresh("g"), Failing(100)
    retry = RetryPolicy((0,), retries=1)
    consumer, _bodies = await consumer_of(client, group, 1, retry=retry, attempts_in_place=2)

    async def letters() -> Any:
        return (await client.call("dlq.list", group=group))["letters"]

    async with face.consuming(consumer, failing.attempt):
        await face.until(letters)
    assert [attempt for _body, attempt in failing.attempts] == [1, 1, 2, 2]
    [letter] = await letters()
    assert "(attempt 2 of 2 in place)" in letter["error_text"]


async def test_a_list_is_handled_again_as_a_whole(face: Face, real: RealBroker) -> None:
    options, calls = {"mode": "ordered", "attempts_in_place": 2}, list[int]()
    consumer, _bodies = await consumer_of(face.connect(real.url), fresh("g"), 3, **options)

    async def handle(messages: Sequence[ReceivedMessage]) -> None:
        calls.append(len(messages))
        if len(calls) == 1:
            raise KeyError("k")

    async with face.consuming(consumer, handle, batch=3, batch_wait=PATIENCE_S):
        await face.until(lambda: consumer.stats.acked == 3)
    assert consumer.stats.retried == 3
    assert calls == [3, 3]


async def test_a_dead_error_ends_them(face: Face, real: RealBroker) -> None:
    failing, retry = Failing(1, ValueError("v")), RetryPolicy((0,), dead=["ValueError"])
    options = {"retry": retry, "attempts_in_place": 5}
    consumer, _bodies = await consumer_of(face.connect(real.url), fresh("g"), 1, **options)
    async with face.consuming(consumer, failing.attempt):
        await face.until(lambda: consumer.stats.dead_lettered == 1)
    assert len(failing.attempts) == 1


async def test_each_attempt_has_a_transaction_of_its_own_with_an_inbox(
    face: Face, real: RealBroker, database: str
) -> None:
    failing, connect = Failing(2), with_effects(database)
    options = {"mode": "ordered", "attempts_in_place": 3}
    consumer, bodies = await consumer_of(face.connect(real.url), fresh("g"), 3, **options)

    async def handle(message: ReceivedMessage, connection: Any) -> None:
        await face.execute(connection, EFFECT, (message.body.decode(), message.attempt))
        await failing.attempt(message)

    async with face.consuming(consumer, handle, inbox=database):
        await face.until(lambda: consumer.stats.acked == 3)
    assert (consumer.stats.retried, consumer.stats.nacked) == (2, 0)
    assert effects(connect) == bodies
    assert len(failing.attempts) == 5


async def test_messages_of_a_failed_list_are_each_tried_in_place_with_an_inbox(
    face: Face, real: RealBroker, database: str
) -> None:
    failing, connect = Failing(2), with_effects(database)
    options = {"mode": "ordered", "attempts_in_place": 2}
    consumer, bodies = await consumer_of(face.connect(real.url), fresh("g"), 3, **options)

    async def handle(messages: Sequence[ReceivedMessage], connection: Any) -> None:
        for message in messages:
            await face.execute(connection, EFFECT, (message.body.decode(), message.attempt))
        await failing.attempt(messages[0])

    async with face.consuming(consumer, handle, inbox=database, batch=3, batch_wait=PATIENCE_S):
        await face.until(lambda: consumer.stats.acked == 3)
    assert (consumer.stats.retried, consumer.stats.nacked) == (1, 0)
    assert effects(connect) == bodies


async def test_the_end_of_the_consume_timeout_ends_them(face: Face, real: RealBroker) -> None:
    failing, retry = Failing(100), RetryPolicy((0,), retries=0)
    options = {"retry": retry, "attempts_in_place": 1_000, "consume_timeout": 3}
    consumer, _bodies = await consumer_of(face.connect(real.url), fresh("g"), 1, **options)
    async with face.consuming(consumer, failing.attempt):
        await face.until(lambda: consumer.stats.dead_lettered == 1)
    assert consumer.stats.nacked == 1
    assert 1 < len(failing.attempts) < 10
