"""An asyncio client with a spool, and a real broker that dies and comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import txmq.aio
from tests.client.aio.interrupting import Interrupter
from tests.client.aio.running import run
from tests.client.real import RealBroker
from txmq.aio import outcome_of
from txmq.errors import (
    Throttled,
)
from txmq.recover.local.spools import KnownTopic, SpoolDirectory, spools_below
from txmq.testing.wait import PATIENCE_S


def bodies(broker: RealBroker, topic: str) -> list[str]:
    return [found.body.decode() for found in broker.read(topic)]


def test_to_cancel_a_send_or_the_close_takes_nothing_back(
    own_broker: RealBroker, tmp_path: Path
) -> None:
    spools, url = tmp_path / "spools", own_broker.url

    async def outage() -> None:
        client = txmq.aio.connect(url, spool=spools, timeout=2.0)
        await client.call("topic.create", name="left", partitions=1)
        await asyncio.to_thread(own_broker.kill)
        interrupter, named = Interrupter(), set[str | None]()
        for n in range(1, 21):
            try:
                await interrupter.run(client.send("left", b"%d" % n, key="k"), n % 4)
            except asyncio.CancelledError as error:
                named.add(outcome_of(error))
        assert named == {"unknown"}
        closed = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closed

    async def back() -> None:
        async with txmq.aio.connect(url, spool=spools) as client:
            await client.spool.wait(PATIENCE_S)

    run(outage())
    assert [summary.messages for summary in spools_below(str(spools))] == [20]
    own_broker.start()
    run(back())
    assert bodies(own_broker, "left") == [str(n) for n in range(1, 21)]


def test_a_full_window_throttles_and_what_waits_for_room_can_be_cancelled(tmp_path: Path) -> None:
    SpoolDirectory(str(tmp_path)).remember_topics({"orders": KnownTopic(1, 1, 1)})

    def partitioner(_topic: str, key: str | None, _partitions: int) -> int:
        if key == "bad":
            raise ValueError("the caller's")  # and makes room
        return 0

    async def scene() -> None:
        async with txmq.aio.connect(
            "txmq://127.0.0.1:1", spool=tmp_path, partitioner=partitioner, window=2, timeout=1
        ) as client:
            sent = [await client.send_async("orders", b"", key=key) for key in ("a", "bad")]
            with pytest.raises(Throttled):
                await client.send_async("orders", b"", timeout=0.0)
            waits = asyncio.create_task(client.send("orders", b""))
            await asyncio.sleep(0)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError) as taken_back:
                await waits
            assert outcome_of(taken_back.value) == "not done"
            assert (await client.send("orders", b"")).spooled  # it waits for room
            assert (await sent[0]).spooled
            with pytest.raises(ValueError, match="the caller's"):
                await sent[1]

    run(scene())
