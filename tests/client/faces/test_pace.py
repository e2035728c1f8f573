"""A consumer with `messages_per_s`, and reads of a partition."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from tests.client.faces.face import Face
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.protocol.consumer.pace import Pace
from txmq.errors import LocalProtocolError
from txmq.model.message import Message, ReceivedMessage
from txmq.testing.wait import PATIENCE_S

PER_S = 20.0


async def paced(client: Any, count: int, per_s: float) -> Any:
    """Return a consumer of so many messages, at that rate."""
    topic = fresh("t")
    await client.send_batch(topic, [Message(b"m") for _ in range(count)])
    return await client.consumer(fresh("g"), [topic], messages_per_s=per_s)


async def test_messages_come_no_faster_than_the_rate(face: Face, real: RealBroker) -> None:
    async with await paced(face.connect(real.url), 60, PER_S) as consumer:
        began = time.monotonic()
        for _ in range(5):
            assert await consumer.receive(PATIENCE_S) is not None
        assert time.monotonic() - began >= 4 / PER_S
        together = await consumer.receive_many(100, PATIENCE_S)
        assert 1 <= len(together) <= PER_S


@pytest.mark.parametrize("call", ["receive", "receive_batch"])
async def test_the_next_message_waits_for_its_time(face: Face, real: RealBroker, call: str) -> None:
    async with await paced(face.connect(real.url), 3, 0.001) as consumer:
        assert await getattr(consumer, call)(PATIENCE_S) is not None
        assert await getattr(consumer, call)(0) is None


async def test_handlers_get_all_messages_in_the_end(face: Face, real: RealBroker) -> None:
    consumer = await paced(face.connect(real.url), 12, 100.0)
    bodies: list[bytes] = []

    async def handle(message: ReceivedMessage) -> None:
        bodies.append(message.body)

    async with face.consuming(consumer, handle, workers=3):
        await face.until(lambda: consumer.stats.acked == 12)
    assert bodies == [b"m"] * 12


def test_a_list_is_followed_by_a_pause_of_its_length() -> None:
    pace = Pace(10.0)
    assert (pace.room(50, 0.0), pace.room(3, 0.0)) == (10, 3)
    pace.took(5, 0.0)
    assert pace.room(1, 0.4) == 0
    assert pace.pause(0.4) == pytest.approx(0.1)
    assert (pace.room(50, 0.5), pace.pause(0.5)) == (10, 0.0)
    assert Pace(0.5).room(50, 0.0) == 1


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), True, "many"])
async def test_a_rate_is_a_number_above_zero(face: Face, real: RealBroker, rate: Any) -> None:
    with pytest.raises(LocalProtocolError, match="messages_per_s is"):
        await paced(face.connect(real.url), 1, rate)


async def test_a_partition_is_read_from_an_offset_on(face: Face, real: RealBroker) -> None:
    client, topic = face.connect(real.url), fresh("t")
    receipts = [await client.send(topic, body, key="k") for body in (b"0", b"1")]
    place = (topic, receipts[0].partition)
    for start in (0, 1, 2):
        found = await client.read(*place, start)
        assert [one.body for one in found.messages] == [b"0", b"1"][start:]
        assert found.next_offset == 2

    async def read_later() -> Any:
        return await client.read(*place, 2, wait=timedelta(seconds=PATIENCE_S))

    later = face.begin(read_later())
    await client.send(topic, b"2", key="k")
    assert [one.body for one in (await later).messages] == [b"2"]
