"""Delays by both faces of the client, on a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import txmq
import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.errors import LocalProtocolError, RecallTooLate
from txmq.model.message import Message
from txmq.testing.wait import PATIENCE_S, wait_until

Connect = Callable[..., Client]
HOUR = timedelta(hours=1)


def bodies(broker: RealBroker, topic: str) -> list[bytes]:
    return [found.body for found in broker.read(topic)]


def test_a_delayed_message_comes_later_and_not_too_early(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    sent_at = time.time()
    receipt = client.send("delays-late", b"late", delay=2.0, key="k")
    client.send("delays-late", b"now", key="k")
    assert receipt.offset is None
    wait_until(lambda: len(bodies(real, "delays-late")) == 2, what="the delayed message")
    assert time.time() - sent_at >= 2.0
    found = real.read("delays-late")
    assert [message.body for message in found] == [b"now", b"late"]
    assert found[1].message_id == receipt.message_id


def test_every_way_to_send_takes_times(real: RealBroker, connect: Connect) -> None:
    client, topic = connect(real.url), "delays-ways"
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    receipts = [
        client.send(topic, b"a", deliver_at=tomorrow),
        client.send_async(topic, b"b", delay=HOUR).result(PATIENCE_S),
    ]
    receipts += client.send_batch(
        topic, [Message(b"c", delay=txmq.delay_level(18)), Message(b"d", deliver_at=tomorrow)]
    )
    with client.transaction() as tx:
        tx.send(topic, b"e", delay=HOUR)
        tx.send(topic, b"f")
    assert [receipt.offset for receipt in receipts] == [None] * 4
    waiting = client.call("message.delayed", topic=topic)["messages"]
    assert {receipt.message_id for receipt in receipts} < {row["message_id"] for row in waiting}
    assert len(waiting) == 5
    wait_until(lambda: bodies(real, topic) == [b"f"], what="what is not delayed")


def test_many_delayed_messages_go_out_in_several_batches(
    real: RealBroker, connect: Connect
) -> None:
    client, topic = connect(real.url), "delays-many"
    receipts = client.send_batch(topic, [Message(b"x", "k", delay=HOUR)] * 2_500)
    futures = [client.send_async(topic, b"x", key="k", delay=HOUR) for _ in range(2_500)]
    ids = {receipt.message_id for receipt in receipts} | {
        future.result(PATIENCE_S).message_id for future in futures
    }
    assert len(ids) == 5_000
    assert len(client.call("message.delayed", topic=topic, limit=10_000)["messages"]) == 5_000


def test_a_message_is_recalled_until_it_is_published(real: RealBroker, connect: Connect) -> None:
    client, topic = connect(real.url), "delays-recall"
    receipt = client.send(topic, b"x", delay=HOUR)
    client.recall(receipt)
    client.recall(receipt.message_id)
    with pytest.raises(RecallTooLate, match="is not waiting to be due"):
        client.recall(client.send(topic, b"y"))
    assert client.call("message.delayed", topic=topic)["messages"] == []


@pytest.mark.parametrize("what", ["x", 7, None, "0" * 32])
def test_what_names_no_message_cannot_be_recalled(connect: Connect, what: Any) -> None:
    with pytest.raises(LocalProtocolError):
        connect("txmq://127.0.0.1:1").recall(what)


def test_a_restart_loses_nothing_and_delivers_nothing_early(
    own_broker: RealBroker, connect: Connect
) -> None:
    client = connect(own_broker.url)
    receipts = [client.send("t", str(n).encode(), delay=1.0 if n % 2 else HOUR) for n in range(20)]
    sent_at = time.time()
    client.recall(receipts[0])
    own_broker.kill()
    own_broker.start()
    wait_until(lambda: len(bodies(own_broker, "t")) == 10, what="the delayed messages")
    assert time.time() - sent_at >= 1.0
    assert sorted(bodies(own_broker, "t")) == sorted(str(n).encode() for n in range(1, 20, 2))
    left = client.call("message.delayed")["messages"]
    assert [row["message_id"] for row in left] == [receipt.message_id for receipt in receipts[2::2]]


def test_twisteds_face_delays_and_recalls(
    real: RealBroker, in_reactor: InReactor, reactor: Any
) -> None:
    async def use() -> list[object]:
        client = txmq.twisted.connect(reactor, real.url, service="s")
        try:
            receipt = await client.send("delays-twisted", b"x", delay=3_600)
            await client.recall(receipt)
            again = client.recall((await client.send("delays-twisted", b"y")).message_id)
            try:
                await again
            except RecallTooLate as error:
                return [receipt.offset, error.detail]
            return []
        finally:
            await client.close()

    offset, detail = in_reactor(use)
    assert offset is None
    assert "late" in detail


def test_messages_are_found_by_key_id_and_time(real: RealBroker, connect: Connect) -> None:
    client, topic = connect(real.url), "delays-find"
    before = datetime.now(UTC) - timedelta(minutes=1)
    receipts = [
        client.send(topic, b"%d" % n, key=f"k{n % 2}", headers={"n": f"{n}"}) for n in range(6)
    ]
    late = client.send(topic, b"late", key="k1", delay=HOUR)
    assert sorted(found.body for found in client.find(topic, key="k1")) == [b"1", b"3", b"5"]
    [by_id] = client.find(topic, message_id=receipts[4])
    assert (by_id.message_id, by_id.offset, by_id.headers) == (
        receipts[4].message_id,
        receipts[4].offset,
        {"n": "4"},
    )
    assert len(list(client.find(topic, start=before))) == 6
    assert list(client.find(topic, end=before)) == []
    [waiting] = client.find(message_id=late.message_id)
    assert (waiting.state, waiting.topic, waiting.offset, waiting.body) == (
        "delayed",
        topic,
        None,
        b"late",
    )
    assert list(client.find(message_id="ab" * 16 + "-0")) == []
    assert topic in {found.topic for found in client.find(key="k1")}
    with pytest.raises(LocalProtocolError, match="name a topic"):
        list(client.find())


def test_a_delayed_message_of_a_transaction_is_found_where_it_was_published(
    real: RealBroker, connect: Connect
) -> None:
    client, topic = connect(real.url), "delays-find-tx"
    with client.transaction() as tx:
        tx.send(topic, b"soon", delay=0.05)
    wait_until(lambda: bodies(real, topic) == [b"soon"], what="the delayed message")
    [found] = client.find(message_id=f"{tx.token.hex}-0")
    assert (found.state, found.offset, found.body) == ("published", 0, b"soon")


def test_twisteds_face_finds(real: RealBroker, in_reactor: InReactor, reactor: Any) -> None:
    async def use() -> list[bytes]:
        client = txmq.twisted.connect(reactor, real.url, service="s")
        try:
            receipt = await client.send("delays-find-twisted", b"x", key="k")
            found = [message async for message in client.find("delays-find-twisted", key="k")]
            found += [
                message async for message in client.find("delays-find-twisted", message_id=receipt)
            ]
            return [message.body for message in found]
        finally:
            await client.close()

    assert in_reactor(use) == [b"x", b"x"]
