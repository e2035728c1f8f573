"""An asyncio client with a spool, and a real broker that dies and comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import txmq.aio
from tests.client.aio.interrupting import Interrupter
from tests.client.aio.running import WAIT_S, run
from tests.client.real import RealBroker
from txmq.aio import outcome_of
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConfigError,
    RequestTimeout,
    SpoolFull,
    StoreError,
    Throttled,
)
from txmq.model.message import Message
from txmq.recover.spool import SpoolDirectory, spools_below
from txmq.recover.spool.directory import KnownTopic


def bodies(broker: RealBroker, topic: str) -> list[str]:
    return [found.body.decode() for found in broker.read(topic)]


def test_sends_of_all_kinds_wait_on_disk_and_come_in_order(
    own_broker: RealBroker, tmp_path: Path
) -> None:
    async def scene() -> None:
        client = txmq.aio.connect(own_broker.url, spool=tmp_path / "spools", timeout=3.0)
        await client.call("topic.create", name="kinds", partitions=1)
        first = await client.send("kinds", b"000", key="k")
        assert not first.spooled
        await asyncio.to_thread(own_broker.kill)
        waiting = [await client.send_async("kinds", b"%03d" % n, key="k") for n in range(1, 300)]
        batch = asyncio.create_task(
            client.send_batch("kinds", [Message(b"%03d" % n, "k") for n in range(300, 310)])
        )
        many = asyncio.create_task(
            client.send_many("kinds", [b"%03d" % n for n in range(310, 320)], ["k"] * 10)
        )
        receipts = [*await asyncio.gather(*waiting), *await batch]
        assert receipts[-1].spooled
        assert [stored.count for stored in await many] == [10]
        client.send_one_way("kinds", b"320", key="k")
        await client.flush()
        assert client.spool.waiting > 20
        assert client.spool.bytes > 0
        assert client.spool.oldest_at > 0
        with pytest.raises(RequestTimeout) as late:
            await client.spool.wait(0.3)
        assert outcome_of(late.value) == "not done"
        unrouted = await client.send("not-known", b"later", key="k")
        assert unrouted.partition == -1
        with pytest.raises(BrokerUnavailable, match="outbox"):
            async with client.transaction() as tx:
                tx.send("kinds", b"no transaction goes to the spool")
        await asyncio.to_thread(own_broker.start)
        await client.spool.wait(WAIT_S)
        last = await client.send("kinds", b"321", key="k")
        assert not last.spooled
        assert (await client.spool.place(receipts[-1], WAIT_S)).offset == 309
        assert (await client.spool.place(unrouted, WAIT_S)).partition >= 0
        assert client.spool.refused == 0
        assert client.stats.spooled >= 320
        await client.close()
        await client.close()
        with pytest.raises(ClientClosed):
            await client.send("kinds", b"closed")

    run(scene())
    assert bodies(own_broker, "kinds") == [f"{n:03d}" for n in range(322)]
    assert spools_below(str(tmp_path / "spools")) == []


def test_what_waits_at_close_is_drained_by_the_next_client(
    own_broker: RealBroker, tmp_path: Path
) -> None:
    """To cancel a send, or the close, takes nothing back."""
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
            await client.spool.wait(WAIT_S)

    run(outage())
    assert [summary.messages for summary in spools_below(str(spools))] == [20]
    own_broker.start()
    run(back())
    assert bodies(own_broker, "left") == [str(n) for n in range(1, 21)]


def test_limits_and_errors_are_those_of_the_other_faces(tmp_path: Path) -> None:
    (tmp_path / "known").mkdir()
    SpoolDirectory(str(tmp_path / "known")).remember_topics({"orders": KnownTopic(1, 1, 1)})
    (tmp_path / "file").write_text("")
    url = "txmq://127.0.0.1:1"

    def partitioner(_topic: str, key: str | None, _partitions: int) -> int:
        if key == "bad":
            raise ValueError("the caller's")
        return 0

    async def scene() -> None:
        with pytest.raises(StoreError):
            txmq.aio.connect(url, spool=tmp_path / "file")
        with pytest.raises(ConfigError, match="cluster"):
            txmq.aio.connect([url], spool=tmp_path)
        with pytest.raises(ConfigError, match="spool="):
            _ = txmq.aio.connect(url).spool
        async with txmq.aio.connect(
            url, spool=tmp_path / "known", partitioner=partitioner, window=2, timeout=1
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
        async with txmq.aio.connect(
            url, spool=tmp_path / "full", spool_bytes=1 << 16, spool_full="refuse", timeout=0.5
        ) as client:
            with pytest.raises(SpoolFull):
                await client.send_batch("orders", [Message(bytes(20_000)) for _ in range(10)])

    run(scene())
