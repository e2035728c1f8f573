"""A client with a spool and a real broker that dies and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.faces.face import Face
from tests.client.real import RealBroker
from txmq.errors import (
    ClientClosed,
    ConfigError,
    RequestTimeout,
    SpoolFull,
    StoreError,
    TxmqError,
)
from txmq.model.message import Message
from txmq.recover.local.spools import KnownTopic, SpoolDirectory, spools_below
from txmq.testing.wait import PATIENCE_S

NOBODY = "txmq://127.0.0.1:1"


def bodies(broker: RealBroker, topic: str) -> list[str]:
    return [found.body.decode() for found in broker.read(topic)]


async def test_sends_of_all_kinds_wait_on_disk_and_come_in_order(
    face: Face, own_broker: RealBroker, tmp_path: Path
) -> None:
    client = face.connect(own_broker.url, spool=tmp_path / "spools", timeout=3.0)
    await client.call("topic.create", name="kinds", partitions=1)
    assert not (await client.send("kinds", b"000", key="k")).spooled
    own_broker.kill()
    waiting = [await face.begin_send(client, "kinds", b"%03d" % n, key="k") for n in range(1, 300)]
    receipts = [await sent for sent in waiting]
    messages = [Message(b"%03d" % n, "k") for n in range(300, 310)]
    receipts += await client.send_batch("kinds", messages)
    [many] = await client.send_many("kinds", [b"%03d" % n for n in range(310, 320)], ["k"] * 10)
    assert (many.count, many.offset) == (10, None)
    client.send_one_way("kinds", b"320", key="k")
    await client.flush()
    # those in flight when the broker died may have been stored there
    assert receipts[-1].spooled
    assert receipts[-1].offset is None
    assert client.spool.waiting > 20
    assert client.spool.bytes > 0
    assert client.spool.oldest_at > 0
    with pytest.raises(RequestTimeout):
        await client.spool.wait(0.1)
    unrouted = await client.send("not-known", b"later", key="k")
    assert unrouted.partition == -1
    with pytest.raises(TxmqError, match="outbox"):
        async with client.transaction() as tx:
            tx.send("kinds", b"no transaction goes to the spool")
    own_broker.start()
    await client.spool.wait(PATIENCE_S)
    last = await client.send("kinds", b"321", key="k")
    assert not last.spooled
    places = [await client.spool.place(receipt, PATIENCE_S) for receipt in receipts]
    assert [place.offset for place in places] == list(range(1, 310))
    assert [place.message_id for place in places] == [one.message_id for one in receipts]
    assert await client.spool.place(last, PATIENCE_S) == last
    assert (await client.spool.place(unrouted, PATIENCE_S)).partition >= 0
    spool = client.spool
    assert (spool.waiting, spool.bytes, spool.oldest_at, spool.refused) == (0, 0, 0, 0)
    await client.close()
    await client.close()
    with pytest.raises(ClientClosed):
        await client.send("kinds", b"closed")
    assert bodies(own_broker, "kinds") == [f"{n:03d}" for n in range(322)]
    assert spools_below(str(tmp_path / "spools")) == []


async def test_what_waits_at_close_is_drained_by_the_next_client(
    face: Face, own_broker: RealBroker, tmp_path: Path
) -> None:
    client = face.connect(own_broker.url, spool=tmp_path, timeout=2.0)
    await client.call("topic.create", name="left", partitions=1)
    own_broker.kill()
    waiting = [await face.begin_send(client, "left", b"%d" % n, key="k") for n in range(20)]
    assert all([(await sent).spooled for sent in waiting])
    await client.close()
    assert [summary.messages for summary in spools_below(str(tmp_path))] == [20]
    own_broker.start()
    await face.connect(own_broker.url, spool=tmp_path).spool.wait(PATIENCE_S)
    assert bodies(own_broker, "left") == [str(n) for n in range(20)]


async def test_a_partitioner_that_raises_fails_its_own_message_only(
    face: Face, tmp_path: Path
) -> None:
    SpoolDirectory(str(tmp_path)).remember_topics({"orders": KnownTopic(1, 1, 1)})

    def partitioner(_topic: str, key: str | None, _partitions: int) -> int:
        if key == "bad":
            raise ValueError("the caller's")
        return 0

    client = face.connect(NOBODY, spool=tmp_path, partitioner=partitioner, timeout=1.0)
    assert (await client.send("orders", b"", key="a")).spooled
    with pytest.raises(ValueError, match="the caller's"):
        await client.send("orders", b"", key="bad")
    assert (await client.send("orders", b"", key="b")).spooled


async def test_limits_and_bad_options_are_typed_errors(face: Face, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        face.connect(NOBODY, spool=tmp_path / "file")
    for options in ({"spool": ""}, {"spool_bytes": 3}, {"spool_full": "drop"}, {"spool": 3}):
        with pytest.raises(ConfigError, match="spool"):
            face.connect(NOBODY, **options)
    with pytest.raises(ConfigError, match="cluster"):
        face.connect([NOBODY], spool=tmp_path)
    with pytest.raises(ConfigError, match="spool="):
        _ = face.connect(NOBODY).spool
    limits = {"spool_bytes": 1 << 16, "spool_full": "refuse", "timeout": 0.5}
    client = face.connect(NOBODY, spool=tmp_path / "full", **limits)
    with pytest.raises(SpoolFull):
        await client.send_batch("limits", [Message(bytes(20_000)) for _ in range(10)])
