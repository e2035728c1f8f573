"""Runs that end when nothing has come for a while."""

from __future__ import annotations

from tests.client.faces.face import Face
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.model.message import ReceivedMessage


async def test_a_run_ends_when_nothing_has_come_for_a_while(face: Face, real: RealBroker) -> None:
    client, topic, seen = face.connect(real.url), fresh("t"), list[bytes]()
    await client.send(topic, b"x")
    consumer = await client.consumer(fresh("g"), [topic])

    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)

    async def has_come() -> list[bytes]:
        await face.consume(consumer, handle, idle_exit=0.1)
        return seen

    await face.until(has_come)
    assert (seen, consumer.stats.acked) == ([b"x"], 1)
