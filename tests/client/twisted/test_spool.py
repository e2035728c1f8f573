"""A Twisted client with a spool and a real broker that dies and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import CancelledError

import txmq.twisted
from tests.client.reactor_thread import WAIT_S, InReactor
from tests.client.real import RealBroker
from txmq.errors import ClientClosed, ConfigError, RequestTimeout, SpoolFull, StoreError
from txmq.model.message import Message
from txmq.recover.spool import SpoolDirectory, spools_below
from txmq.recover.spool.directory import KnownTopic


def bodies(broker: RealBroker, topic: str) -> list[str]:
    return [found.body.decode() for found in broker.read(topic)]


def test_sends_of_all_kinds_wait_on_disk_and_come_in_order(
    own_broker: RealBroker, reactor: Any, in_reactor: InReactor, tmp_path: Path
) -> None:
    client = txmq.twisted.connect(reactor, own_broker.url, spool=tmp_path / "spools")

    async def scene() -> None:
        await client.call("topic.create", name="kinds", partitions=1)
        first = await client.send("kinds", b"000", key="k")
        assert not first.spooled
        own_broker.kill()
        waiting = [client.send("kinds", b"%03d" % n, key="k") for n in range(1, 300)]
        batch = client.send_batch("kinds", [Message(b"%03d" % n, "k") for n in range(300, 310)])
        many = client.send_many("kinds", [b"%03d" % n for n in range(310, 320)], ["k"] * 10)
        client.send_one_way("kinds", b"320", key="k")
        receipts = [*[await sent for sent in waiting], *await batch]
        assert receipts[-1].spooled
        assert [stored.count for stored in await many] == [10]
        await client.flush()
        assert client.spool.waiting > 20
        assert client.spool.bytes > 0
        assert client.spool.oldest_at > 0
        with pytest.raises(RequestTimeout):
            await client.spool.wait(0.1)
        unrouted = await client.send("not-known", b"later", key="k")
        assert unrouted.partition == -1
        own_broker.start()
        await client.spool.wait(WAIT_S)
        last = await client.send("kinds", b"321", key="k")
        assert not last.spooled
        assert (await client.spool.place(receipts[-1], WAIT_S)).offset == 309
        assert (await client.spool.place(unrouted, WAIT_S)).partition >= 0
        assert client.spool.refused == 0
        await client.close()
        await client.close()
        with pytest.raises(ClientClosed):
            await client.send("kinds", b"closed")

    in_reactor(scene)
    assert bodies(own_broker, "kinds") == [f"{n:03d}" for n in range(322)]
    assert spools_below(str(tmp_path / "spools")) == []


def test_what_waits_at_close_is_drained_by_the_next_client(
    own_broker: RealBroker, reactor: Any, in_reactor: InReactor, tmp_path: Path
) -> None:
    spools, url = tmp_path / "spools", own_broker.url

    async def outage() -> None:
        client = txmq.twisted.connect(reactor, url, spool=spools, timeout=2.0)
        await client.call("topic.create", name="left", partitions=1)
        own_broker.kill()
        sent = [client.send("left", b"%d" % n, key="k") for n in range(20)]
        sent[3].addErrback(lambda failure: failure.trap(CancelledError))
        sent[3].cancel()
        closed = client.close()
        assert [(await one).spooled for at, one in enumerate(sent) if at != 3] == [True] * 19
        await closed

    async def back() -> None:
        client = txmq.twisted.connect(reactor, url, spool=spools)
        await client.spool.wait(WAIT_S)
        await client.close()

    in_reactor(outage)
    assert [summary.messages for summary in spools_below(str(spools))] == [20]
    own_broker.start()
    in_reactor(back)
    assert bodies(own_broker, "left") == [str(n) for n in range(20)]


def test_a_partitioner_that_raises_fails_its_own_message_only(
    reactor: Any, in_reactor: InReactor, tmp_path: Path
) -> None:
    SpoolDirectory(str(tmp_path)).remember_topics({"orders": KnownTopic(1, 1, 1)})

    def partitioner(_topic: str, key: str | None, _partitions: int) -> int:
        if key == "bad":
            raise ValueError("the caller's")
        return 0

    async def scene() -> None:
        url = "txmq://127.0.0.1:1"
        client = txmq.twisted.connect(reactor, url, spool=tmp_path, partitioner=partitioner)
        first, bad, last = [client.send("orders", b"", key=key) for key in ("a", "bad", "b")]
        assert (await first).spooled
        with pytest.raises(ValueError, match="the caller's"):
            await bad
        assert (await last).spooled
        await client.close()

    in_reactor(scene)


def test_limits_and_bad_options_are_typed_errors(
    own_broker: RealBroker, reactor: Any, in_reactor: InReactor, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    async def scene() -> None:
        with pytest.raises(StoreError):
            txmq.twisted.connect(reactor, own_broker.url, spool=tmp_path / "file")
        with pytest.raises(ConfigError, match="cluster"):
            txmq.twisted.connect(reactor, [own_broker.url], spool=tmp_path)
        plain = txmq.twisted.connect(reactor, own_broker.url)
        with pytest.raises(ConfigError, match="spool="):
            _ = plain.spool
        client = txmq.twisted.connect(
            reactor,
            own_broker.url,
            spool=tmp_path / "spools",
            spool_bytes=1 << 16,
            spool_full="refuse",
            timeout=0.5,
        )
        await client.send("limits", b"first")
        own_broker.kill()
        with pytest.raises(SpoolFull):
            await client.send_batch("limits", [Message(bytes(20_000)) for _ in range(10)])
        await client.close()

    in_reactor(scene)
