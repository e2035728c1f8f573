"""What a handler sends says what it follows from, in every face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.client.effects import with_effects
from tests.client.faces.face import Face
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.model.causation import caused_by
from txmq.model.message import Message, ReceivedMessage

GIVEN = {"causation": "mine", "correlation": "o-17"}


async def headers_in(client: Any, topic: str) -> dict[str, dict[str, str]]:
    """Return the headers of the messages of a topic, by their bodies."""
    return {found.body.decode(): dict(found.headers) async for found in client.find(topic)}


@pytest.mark.parametrize("spool", ["", "spools"])
async def test_each_kind_of_send_in_a_handler_names_its_cause(
    face: Face, real: RealBroker, tmp_path: Path, spool: str
) -> None:
    client = face.connect(real.url, **({"spool": tmp_path / spool} if spool else {}))
    orders, effects = fresh("orders"), fresh("effects")
    await client.call("topic.create", name=effects, partitions=1)
    first = await client.send(orders, b"first", headers={"region": "eu"})
    consumer = await client.consumer(fresh("g"), [orders])

    async def handle(_message: ReceivedMessage) -> None:
        await client.send(effects, b"send", headers={"own": "1"})
        await client.send_batch(effects, [Message(b"batch"), Message(b"given", headers=GIVEN)])
        await (await face.begin_send(client, effects, b"async"))
        async with client.transaction() as tx:
            tx.send(effects, b"transaction")

    async with face.consuming(consumer, handle):
        await face.until(lambda: consumer.stats.acked == 1)
    await client.send(effects, b"outside")
    cause = {"causation": first.message_id, "correlation": first.message_id}
    assert await headers_in(client, effects) == {
        "send": {"own": "1", **cause},
        "batch": cause,
        "given": GIVEN,
        "async": cause,
        "transaction": cause,
        "outside": {},
    }


async def test_a_chain_of_handlers_has_one_correlation(face: Face, real: RealBroker) -> None:
    client, topics = face.connect(real.url), [fresh("t") for _ in range(3)]
    first = await client.send(topics[0], b"0", key="o-17")
    consumer = await client.consumer(fresh("g"), topics)

    async def handle(message: ReceivedMessage) -> None:
        number = int(message.body) + 1
        if number < 3:
            await client.send(topics[number], b"%d" % number, key=f"other-{number}")

    async with face.consuming(consumer, handle):
        await face.until(lambda: consumer.stats.acked == 3)
    [second] = [found async for found in client.find(topics[1])]
    [third] = [found async for found in client.find(topics[2])]
    assert second.headers["causation"] == second.headers["correlation"] == first.message_id
    assert third.headers["causation"] == second.message_id
    assert third.headers["correlation"] == first.message_id


# On Twisted such a handler runs in a thread, and has no client there.
@pytest.mark.parametrize("face", ["blocking", "aio"], indirect=True)
async def test_a_handler_with_an_inbox_sends_with_its_cause(
    face: Face, real: RealBroker, database: str
) -> None:
    with_effects(database)
    client, orders, effects = face.connect(real.url), fresh("orders"), fresh("effects")
    first = await client.send(orders, b"first")
    consumer = await client.consumer(fresh("g"), [orders])

    async def handle(_message: ReceivedMessage, _connection: Any) -> None:
        await client.send(effects, b"effect")

    async with face.consuming(consumer, handle, inbox=database):
        await face.until(lambda: consumer.stats.acked == 1)
    found = await headers_in(client, effects)
    assert found["effect"]["causation"] == first.message_id


async def test_a_handler_of_lists_says_itself_what_caused_a_send(
    face: Face, real: RealBroker
) -> None:
    client, orders, effects = face.connect(real.url), fresh("orders"), fresh("effects")
    await client.call("topic.create", name=effects, partitions=1)
    receipts = await client.send_batch(orders, [Message(b"a", "k"), Message(b"b", "k")])
    consumer = await client.consumer(fresh("g"), [orders])

    async def handle(messages: Sequence[ReceivedMessage]) -> None:
        await client.send(effects, b"of none")
        for message in messages:
            with caused_by(message):
                await client.send(effects, message.body)

    async with face.consuming(consumer, handle, batch=2, batch_wait=1.0):
        await face.until(lambda: consumer.stats.acked == 2)
    found = await headers_in(client, effects)
    assert found["of none"] == {}
    assert [found[body]["causation"] for body in ("a", "b")] == [
        receipt.message_id for receipt in receipts
    ]


async def test_no_headers_of_a_sender_are_too_many_for_a_cause(
    face: Face, real: RealBroker
) -> None:
    client, topic = face.connect(real.url), fresh("t")
    many = {f"h{number}": "x" * 480 for number in range(64)}
    long = {"correlation": "c" * 600}
    cause = ReceivedMessage(topic, 0, 0, None, None, long, b"", f"{'0' * 32}-1", 1, 0, 0)
    with caused_by(cause):
        await client.send(topic, b"m", headers=many)
    found = await headers_in(client, topic)
    added = {"causation": cause.message_id, "correlation": cause.message_id}
    assert found["m"] == many | added, "a correlation that is too long is not inherited"
