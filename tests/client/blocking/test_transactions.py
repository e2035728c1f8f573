"""Transactions that the broker decides, and jobs, against the real broker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import txmq
from tests.client.proxy import Proxy
from tests.client.real import RealBroker, bodies
from tests.client.scripted_broker import FakeBroker
from tests.client.world import ApplicationError, fail
from txmq.client.blocking.client import Client
from txmq.client.protocol.transaction.tokens import new_token, parse_token
from txmq.errors import (
    ClientClosed,
    ConfigError,
    InDoubt,
    LocalProtocolError,
    NotLeased,
    TransactionAborted,
)
from txmq.model.actions import ReplayAction
from txmq.model.bundle import BundleReceipt, BundleState
from txmq.testing.wait import PATIENCE_S
from txmq.wire.bundle import pack_bundle_receipt, unpack_part
from txmq.wire.data_requests import Opcode

Connect = Callable[..., Client]
REPLAY = ReplayAction("group", "orders", 0, 9)


def test_a_local_transaction_is_seen_whole(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    with client.transaction() as tx:
        tx.send("local-a", b"1", key="k")
        tx.send("local-b", b"2", key="k", tag="t", headers={"h": "v"})
        tx.send("local-a", b"3", key="k")
        tx.send_many("local-a", [b"4", b"5"], ["k", "k"])
        tx.send("local-a", b"6", key="k")
        assert "local-a" not in {topic["name"] for topic in client.call("topic.list")["topics"]}
    tx.wait_published(PATIENCE_S)
    assert bodies(real, "local-a") == [b"1", b"3", b"4", b"5", b"6"]
    receipts = tx.receipts()
    assert [(got.topic, got.offset) for got in receipts] == [
        ("local-a", 0), ("local-b", 0),
        ("local-a", 1), ("local-a", 2), ("local-a", 3), ("local-a", 4),
    ]  # fmt: skip
    found = {
        message.message_id: message.body
        for topic in ("local-a", "local-b")
        for message in real.read(topic)
    }
    assert [found[got.message_id] for got in receipts] == [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert receipts[0].message_id.startswith(tx.token.hex)


def test_a_block_that_raises_sends_nothing(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    tx = client.transaction()
    with suppress(ApplicationError), tx:
        tx.send("nothing", b"x")
        fail()
    with pytest.raises(LocalProtocolError):
        tx.wait_published(PATIENCE_S)
    assert client.call("tx.list", state="undecided")["transactions"] == []


def test_a_transaction_marked_to_be_rolled_back_cannot_commit(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    client.call("topic.create", name="marked", partitions=1)
    local, half = client.transaction(), client.transaction(checker="billing")

    def marked_local() -> None:
        with local:
            local.send("marked", b"1")
            local.set_rollback_only("stock is short")
            local.send("marked", b"2")

    def marked_half() -> None:
        with half:
            half.send("marked", b"3")
            half.prepare()
            half.set_rollback_only()

    with pytest.raises(TransactionAborted, match="stock is short"):
        marked_local()
    with pytest.raises(TransactionAborted):
        marked_half()
    assert client.call("tx.show", token=half.token.hex)["state"] == "ROLLED_BACK"
    assert bodies(real, "marked") == []
    with pytest.raises(ClientClosed):
        local.set_rollback_only()


def test_an_empty_transaction_is_nothing(fake: FakeBroker, connect: Connect) -> None:
    with connect(fake.url).transaction() as tx:
        pass
    tx.wait_published(PATIENCE_S)
    assert tx.receipts() == []
    assert fake.accepted == 0


def test_a_savepoint_withdraws_what_came_after_it(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    with client.transaction() as tx:
        tx.send("savepoints", b"1", key="k")
        with suppress(ApplicationError), tx.savepoint():
            tx.send("savepoints", b"not this", key="k")
            fail()
        with tx.savepoint():
            tx.send("savepoints", b"2", key="k")
    assert bodies(real, "savepoints") == [b"1", b"2"]


def test_a_transaction_is_for_one_use_and_inside_its_block(
    real: RealBroker, connect: Connect
) -> None:
    tx = connect(real.url).transaction()
    with pytest.raises(LocalProtocolError, match="has not begun"):
        tx.send("t", b"x")
    with tx:
        pass
    for call in (lambda: tx.send("t", b"x"), lambda: tx.act(REPLAY), tx.__enter__):
        with pytest.raises(ClientClosed, match="is over"):
            call()


def test_a_local_transaction_larger_than_a_frame_goes_in_parts(
    real: RealBroker, connect: Connect
) -> None:
    with connect(real.url).transaction() as tx:
        tx.send_many("large", [b"x" * (4 << 20)] * 5, partition=0)
    tx.wait_published(PATIENCE_S)
    assert [receipt.offset for receipt in tx.receipts()] == [0, 1, 2, 3, 4]


def test_a_grown_topic_is_found_out_and_the_bundle_is_built_again(
    real: RealBroker, connect: Connect
) -> None:
    client, other = connect(real.url), connect(real.url)
    client.send("grown", b"before", key="k")
    other.call("topic.grow", name="grown", partitions=32)
    with client.transaction() as tx:
        for n in range(64):
            tx.send("grown", b"x", key=f"k{n}")
    tx.wait_published(PATIENCE_S)
    assert {got.partition for got in tx.receipts()} - set(range(8))


def test_a_bundle_whose_answer_is_lost_is_stored_once(real: RealBroker, connect: Connect) -> None:
    with Proxy(real.url) as proxy:
        proxy.lose[Opcode.GROUP] = 2
        with connect(proxy.url).transaction() as tx:
            tx.send("once", b"x")
    assert bodies(real, "once") == [b"x"]
    assert tx.token.hex


def test_without_an_answer_the_broker_is_asked_for_the_state(
    real: RealBroker, connect: Connect
) -> None:
    with Proxy(real.url) as proxy:
        proxy.hold.add(Opcode.GROUP)
        with connect(proxy.url).transaction(timeout=2.0) as tx:
            tx.send("asked", b"x")
    assert bodies(real, "asked") == [b"x"]
    assert tx.token.version == 7


def test_a_transaction_whose_end_is_unknown_is_in_doubt(real: RealBroker, connect: Connect) -> None:
    with Proxy(real.url) as proxy:
        client = connect(proxy.url, timeout=6.0)
        client.send("doubt", b"first")
        proxy.hold |= {Opcode.GROUP, Opcode.CALL}
        with pytest.raises(InDoubt) as caught, client.transaction(timeout=2.0) as tx:
            tx.send("doubt", b"x")
    assert (caught.value.outcome, caught.value.token) == ("unknown", str(tx.token))


def test_what_cannot_be_is_refused_before_it_begins(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    wrong: list[dict[str, Any]] = [
        {"on_unavailable": "outbox"}, {"timeout": 0}, {"check_after": -1}, {"colour": "red"},
        {"checker": "no name"},
        {"checker": "billing", "connection": object()}, {"connection": object()},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises((ConfigError, LocalProtocolError)), client.transaction(**options):
            pass
    with client.transaction() as tx, pytest.raises(LocalProtocolError, match="consumer"):
        tx.ack("no message")
    assert fake.accepted == 0


class StubConsumer:
    """A stub of a consumer, as far as a transaction uses it."""

    log_id = None  # whose messages these are, it does not know yet

    def __init__(self) -> None:
        self.log: list[object] = []

    def ack_actions(self, delivered: object) -> list[tuple[object, ...]]:
        self.log.append("asked")
        return [("ack", "group", "member", 1, "orders", 0, 5, 6)]

    def transaction_ended(self, delivered: object, *, committed: bool | None) -> None:
        self.log.append(committed)


class Delivered:
    """A stub of a delivered message, as far as a transaction uses it."""

    def __init__(self, owner: StubConsumer) -> None:
        self.fetched = self
        self.owner = owner


def test_acks_go_with_the_bundle_and_the_consumer_learns_the_outcome(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.others = lambda _frame: pack_bundle_receipt(BundleReceipt(BundleState.PUBLISHED, 1))
    client, consumer = connect(fake.url), StubConsumer()
    with client.transaction() as tx:
        tx.ack(Delivered(consumer))
        with suppress(ApplicationError), tx.savepoint():
            tx.ack(Delivered(consumer))
            fail()
        tx.act(REPLAY)
    part = unpack_part(fake.frames[-1].payload)
    assert part.description is not None
    assert part.description.actions == (
        ("ack", "group", "member", 1, "orders", 0, 5, 6), ("replay", "group", "orders", 0, 9),
    )  # fmt: skip
    assert consumer.log == ["asked", "asked", False, True]


def test_messages_acked_in_a_failed_transaction_are_the_consumers_again(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.others = lambda _frame: NotLeased("gone")
    client, consumer = connect(fake.url), StubConsumer()
    with pytest.raises(NotLeased), client.transaction() as tx:
        tx.ack(Delivered(consumer))
    with suppress(ApplicationError), client.transaction() as tx:
        tx.ack(Delivered(consumer))
        fail()
    assert consumer.log == ["asked", False, "asked", False]


def test_what_a_stored_bundle_acked_is_delivered_again_when_it_is_rolled_back(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    client.send("reserved", b"1")
    with client.consumer(
        "keeper", topics=["reserved"], retry=txmq.RetryPolicy((0.01,))
    ) as consumer:
        first = consumer.receive(PATIENCE_S)
        assert first is not None
        with suppress(ApplicationError), client.transaction(checker="billing") as tx:
            tx.ack(first)
            tx.prepare()
            fail()
        assert not first.in_hand
        again = consumer.receive(PATIENCE_S)
        assert again is not None
        assert (again.body, again.attempt) == (b"1", 2)
        consumer.ack(again)


def test_a_message_and_what_comes_of_it_are_one_decision(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    client.send_batch("raw", [txmq.Message(str(n).encode(), key="k") for n in range(3)])
    with client.consumer("cook", topics=["raw"], mode="ordered") as consumer:
        for n in range(3):
            message = consumer.receive(PATIENCE_S)
            assert message is not None
            with suppress(ApplicationError), client.transaction() as tx:
                tx.send("cooked", message.body, key="k")
                tx.ack(message)
                if n == 1:
                    fail()
            if n == 1:
                consumer.ack(message)
    assert bodies(real, "cooked") == [b"0", b"2"]
    with client.consumer("cook", topics=["raw"], mode="ordered") as consumer:
        assert consumer.receive(0.3) is None


def test_a_bundle_of_a_job_may_be_larger_than_a_frame(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    job, body = client.job(), b"x" * (1 << 20)
    group = job.group()
    for n in range(12):
        group.send("big-job", body, key=f"k{n}")
    group.send_many("big-job", [body] * 12, [f"k{n}" for n in range(12)])
    token = group.store()
    with pytest.raises(ClientClosed):
        group.send("big-job", b"late")
    job.decide([token])
    assert job.wait_published([token])
    found = real.read("big-job")
    assert len(found) == 24
    assert len({message.message_id for message in found}) == 24
    assert {message.message_id.partition("-")[0] for message in found} == {token.hex}


def test_tokens_sort_by_time_and_are_read_in_every_form() -> None:
    tokens = [new_token() for _ in range(50)]
    assert len(set(tokens)) == 50
    assert {token.version for token in tokens} == {7}
    milliseconds = [token.int >> 80 for token in tokens]
    assert milliseconds == sorted(milliseconds)
    assert {
        parse_token(tokens[0].hex),
        parse_token(tokens[0].bytes),
        parse_token(str(tokens[0])),
    } == {tokens[0]}
    with pytest.raises(LocalProtocolError, match="Invalid token"):
        parse_token("zz")
