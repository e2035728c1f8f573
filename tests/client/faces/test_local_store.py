"""Failed messages in a consumer's local store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.client.effects import EFFECT, effects, with_effects
from tests.client.faces.face import Face
from tests.client.real import RealBroker
from tests.client.real_consumers import closing_broker, unprocessed_of
from tests.client.scripted_member import fresh
from txmq.errors import BrokerUnavailable, DirectoryInUse, LocalProtocolError, TxmqError
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.recover.local import scan, stores_below
from txmq.testing.wait import PATIENCE_S

RETRY = RetryPolicy((0.3,), retries=5)
LATER = RetryPolicy((4.0,), retries=5)
MUCH_LATER = RetryPolicy((600,), retries=5)


async def send(client: Any, topic: str, count: int = 3, keys: int = 1) -> list[str]:
    bodies = [f"m{number:02}" for number in range(count)]
    await client.send_batch(
        topic, [Message(body.encode(), f"k{number % keys}") for number, body in enumerate(bodies)]
    )
    return bodies


async def consumer_of(client: Any, group: str, topic: str, directory: Path, **options: Any) -> Any:
    settings = {"on_failure": "local", "local_store": directory, "retry": RETRY}
    return await client.consumer(group, [topic], **{**settings, **options})


async def all_processed(client: Any, group: str) -> bool:
    return unprocessed_of(await client.call("group.show", group=group)) == 0


class Failing:
    """Attempts at messages, of which the first `failures` of each fail."""

    def __init__(self, failures: int = 1) -> None:
        self._failures = failures
        self.attempts: list[tuple[str, int]] = []

    async def attempt(self, message: ReceivedMessage) -> None:
        self.attempts.append((message.body.decode(), message.attempt))
        if message.attempt <= self._failures:
            raise KeyError("k")


async def test_failed_messages_are_retried_here_and_settled_at_the_broker(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic, group, failing = face.connect(real.url), fresh("t"), fresh("g"), Failing()
    bodies = await send(client, topic)
    consumer = await consumer_of(client, group, topic, tmp_path)
    async with face.consuming(consumer, failing.attempt, workers=2):
        await face.until(lambda: (consumer.stats.acked, consumer.stats.stored) == (3, 0))
        assert (consumer.stats.nacked, consumer.stats.stored_attempts) == (3, 3)
        [store] = stores_below(str(tmp_path))
        # On disk, too, while the consumer has no other work: it may be killed next.
        await face.until(lambda: not list(scan(store.path)))
    assert sorted(failing.attempts) == [(body, attempt) for body in bodies for attempt in (1, 2)]
    assert await all_processed(client, group)


async def test_an_operator_hastens_edits_and_skips_what_a_live_store_retries(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic, group, failing = face.connect(real.url), fresh("t"), fresh("g"), Failing()
    await send(client, topic, 3, keys=3)
    named: dict[str, Any] = {"operator": "kim", "reason": "a test"}
    consumer = await consumer_of(client, group, topic, tmp_path, retry=MUCH_LATER, session=1)
    async with face.consuming(consumer, failing.attempt, workers=2):
        await face.until(lambda: consumer.stats.stored == 3)
        letters: dict[str, Any] = {}

        async def are_told() -> bool:
            async for one in client.letters(group, states=["local"]):
                letters[one.key] = one
            return len(letters) == 3

        await face.until(are_told)
        assert (await client.retry_now(group, [letters["k0"]], operator="kim")).refused == []
        assert await client.edit_letter(letters["k1"], body=b"mended", **named) == 1
        assert (await client.skip_retries(group, [letters["k2"]], **named)).refused == []
        assert (await client.retry_now(group, [letters["k1"]], operator="kim")).refused == []
        await face.until(lambda: {("m00", 2), ("mended", 2)} <= {*failing.attempts})
        await face.until(lambda: consumer.stats.stored == 0)
    assert ("m02", 2) not in failing.attempts
    assert await all_processed(client, group)


async def test_what_fails_for_good_is_a_dead_letter_with_its_attempts(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic, group, failing = face.connect(real.url), fresh("t"), fresh("g"), Failing(100)
    await send(client, topic, 1)
    retry = RetryPolicy((0.1,), retries=2)
    consumer = await consumer_of(client, group, topic, tmp_path, retry=retry)

    async def letters() -> Any:
        return (await client.call("dlq.list", group=group))["letters"]

    async with face.consuming(consumer, failing.attempt):
        await face.until(letters)
    assert [attempt for _body, attempt in failing.attempts] == [1, 2, 3]
    [letter] = await letters()
    assert (letter["attempts"], letter["error_type"]) == (3, "KeyError")


@pytest.mark.parametrize("on_failure", ["local", "broker"])
async def test_effects_come_while_the_broker_is_away_and_acks_follow(
    face: Face, own_broker: RealBroker, tmp_path: Path, on_failure: str
) -> None:
    client, attempts = face.connect(own_broker.url), list[int]()

    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            await client.send("other", b"after the lease, which is durable then")
            own_broker.kill()
            raise KeyError("k")

    await client.send("t", b"m00")
    consumer = await consumer_of(client, "g", "t", tmp_path / "s", on_failure=on_failure)
    async with face.consuming(consumer, handle):
        await face.until(lambda: len(attempts) == 2, "the effect")
        own_broker.start()
        await face.until(lambda: consumer.stats.rejoined, "the broker is there again")
        await face.until(lambda: all_processed(client, "g"), "the ack")
    assert attempts == [1, 2]
    assert await all_processed(client, "g")


async def test_keys_keep_their_order(face: Face, real: RealBroker, tmp_path: Path) -> None:
    client, topic, group = face.connect(real.url), fresh("t"), fresh("g")
    await send(client, topic, 12, keys=3)
    done: dict[str, list[str]] = {}

    async def handle(message: ReceivedMessage) -> None:
        if message.attempt == 1 and message.body in (b"m00", b"m04", b"m05"):
            raise KeyError("k")
        done.setdefault(message.key or "", []).append(message.body.decode())

    consumer = await consumer_of(client, group, topic, tmp_path, mode="ordered")
    async with face.consuming(consumer, handle, workers=3):
        await face.until(lambda: consumer.stats.acked == 12)
    assert sorted(map(len, done.values())) == [4, 4, 4]
    assert all(bodies == sorted(bodies) for bodies in done.values())


async def test_the_next_process_goes_on_with_what_is_stored(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic, group, failing = face.connect(real.url), fresh("t"), fresh("g"), Failing()
    await send(client, topic)
    for attempts in (3, 6):
        consumer = await consumer_of(client, group, topic, tmp_path, retry=LATER)
        async with face.consuming(consumer, failing.attempt):
            await face.until(lambda: len(failing.attempts) >= attempts)  # noqa: B023  # called at once
    assert sorted(failing.attempts)[1::2] == [("m00", 2), ("m01", 2), ("m02", 2)]
    assert await all_processed(client, group)


async def test_a_second_consumer_is_told_that_the_directory_is_in_use(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic, group = face.connect(real.url), fresh("t"), fresh("g")
    await send(client, topic, 1)
    async with await consumer_of(client, group, topic, tmp_path):
        with pytest.raises(DirectoryInUse) as refused:
            await consumer_of(client, group, topic, tmp_path)
    assert refused.value.hint


async def test_a_directory_that_cannot_be_used_is_refused(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic = face.connect(real.url), fresh("t")
    await send(client, topic, 1)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(TxmqError) as refused:
        await consumer_of(client, fresh("g"), topic, tmp_path / "file")
    assert not isinstance(refused.value, BrokerUnavailable)


async def test_the_brokers_copy_of_a_lost_disk_is_adopted(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic, group, failing = face.connect(real.url), fresh("t"), fresh("g"), Failing()
    await send(client, topic)
    consumer = await consumer_of(client, group, topic, tmp_path, retry=MUCH_LATER)
    async with face.consuming(consumer, failing.attempt):
        await face.until(lambda: consumer.stats.stored == 3, "the failures are stored")
    shutil.rmtree(tmp_path)
    [store] = (await client.call("recover.list", group=group))["stores"]
    await client.call("recover.adopt", group=group, store=store["store"])
    other = await client.consumer(group, [topic], retry=MUCH_LATER)
    async with face.consuming(other, failing.attempt):
        await face.until(lambda: other.stats.acked == 3)
    assert await all_processed(client, group)


async def test_each_message_takes_effect_once_with_an_inbox(
    face: Face, real: RealBroker, tmp_path: Path, database: str
) -> None:
    client, topic, group, failing = face.connect(real.url), fresh("t"), fresh("g"), Failing()
    connect = with_effects(database)
    bodies = await send(client, topic, 6, keys=2)

    async def handle(message: ReceivedMessage, connection: Any) -> None:
        await face.execute(connection, EFFECT, (message.body.decode(), message.attempt))
        await failing.attempt(message)

    consumer = await consumer_of(client, group, topic, tmp_path, mode="ordered")
    async with face.consuming(consumer, handle, inbox=database, workers=2):
        await face.until(lambda: (consumer.stats.acked, consumer.stats.stored) == (6, 0))
    assert effects(connect) == bodies
    assert await all_processed(client, group)


async def test_iteration_and_waiting_acks_work_with_stored_messages(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic, group = face.connect(real.url), fresh("t"), fresh("g")
    await send(client, topic, 1)
    async with await consumer_of(client, group, topic, tmp_path) as consumer:
        first = await consumer.receive(PATIENCE_S)
        consumer.nack(first)
        second = await consumer.receive(PATIENCE_S)
        assert (second.body, second.attempt) == (b"m00", 2)
        with pytest.raises(LocalProtocolError, match="no transaction can ack it"):
            async with client.transaction() as tx:
                tx.ack(second)
        await consumer.ack(second, wait=True)
        await face.until(lambda: all_processed(client, group))


async def test_several_topics_have_a_store_each(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topics, failing = face.connect(real.url), [fresh("t"), fresh("t")], Failing()
    for topic in topics:
        await send(client, topic, 2)
    settings: Any = {"on_failure": "local", "local_store": tmp_path, "retry": RETRY}
    consumer = await client.consumer(fresh("g"), topics, **settings)
    async with face.consuming(consumer, failing.attempt):
        await face.until(lambda: consumer.stats.acked == 4)
    assert len(stores_below(str(tmp_path))) == 2


async def test_several_brokers_have_a_store_each(
    face: Face, own_broker: RealBroker, tmp_path: Path
) -> None:
    failing = Failing()
    with closing_broker(tmp_path / "other") as other:
        cluster = face.connect([own_broker.url, other.url])
        for number in range(8):
            await cluster.send("t", f"m{number:02}".encode(), key=f"k{number}")
        consumer = await consumer_of(cluster, "g", "t", tmp_path / "s")
        async with face.consuming(consumer, failing.attempt, workers=2):
            await face.until(lambda: consumer.stats.acked == 8)
        await cluster.close()
    assert len(list((tmp_path / "s").glob("*/*"))) == 2


async def test_a_topic_made_again_has_another_store(
    face: Face, own_broker: RealBroker, tmp_path: Path
) -> None:
    client, failing = face.connect(own_broker.url), Failing()
    await client.send("t", b"m00")
    async with await consumer_of(client, "g", "t", tmp_path / "s") as consumer:
        consumer.nack(await consumer.receive(PATIENCE_S), 600.0)
        await face.until(lambda: consumer.stats.stored == 1)
    await client.call("topic.delete", name="t")
    await client.call("topic.create", name="t", partitions=1)
    await client.send("t", b"m01")
    anew = await consumer_of(client, "g", "t", tmp_path / "s")
    async with face.consuming(anew, failing.attempt):
        await face.until(lambda: (anew.stats.stored, anew.stats.acked) == (0, 1))
    assert failing.attempts == [("m01", 1), ("m01", 2)]


async def test_a_reset_takes_messages_back_and_they_have_one_effect(
    face: Face, real: RealBroker, tmp_path: Path, database: str
) -> None:
    client, topic, group, tried = face.connect(real.url), fresh("t"), fresh("g"), set[bytes]()
    connect = with_effects(database)
    bodies = await send(client, topic)

    async def handle(message: ReceivedMessage, connection: Any) -> None:
        await face.execute(connection, EFFECT, (message.body.decode(), message.attempt))
        if message.body not in tried:
            tried.add(message.body)
            raise KeyError("k")

    async def settled() -> bool:
        return not consumer.stats.stored and await all_processed(client, group)

    # A short session: its next heartbeat tells the consumer of the reset.
    consumer = await consumer_of(client, group, topic, tmp_path, retry=MUCH_LATER, session=3)
    async with face.consuming(consumer, handle, inbox=database):
        await face.until(lambda: consumer.stats.stored == 3, "the failures are stored")
        await client.call("group.reset", group=group, topic=topic, to="first")
        await face.until(settled)
    assert effects(connect) == bodies


async def test_a_group_that_is_deleted_and_made_again_goes_on(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic, group, failing = face.connect(real.url), fresh("t"), fresh("g"), Failing()
    await send(client, topic)
    consumer = await consumer_of(client, group, topic, tmp_path, retry=LATER)
    async with face.consuming(consumer, failing.attempt):
        await face.until(lambda: len(failing.attempts) >= 3)
    await client.call("group.delete", group=group)

    async def settled() -> bool:
        second = {body for body, attempt in failing.attempts if attempt == 2}
        return len(second) == 3 and await all_processed(client, group)

    again = await consumer_of(client, group, topic, tmp_path, retry=LATER)
    async with face.consuming(again, failing.attempt):
        await face.until(settled)
