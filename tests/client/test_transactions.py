"""Transactions that the broker decides, half messages with a checker, and jobs: against the real broker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import txmq
from tests.client.fake import FakeBroker
from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from txmq.client.blocking import Client
from txmq.client.checkers import Half
from txmq.client.tokens import as_token, new_token
from txmq.errors import (
    ClientClosed,
    ConfigError,
    InDoubt,
    LocalProtocolError,
    NotLeased,
    TransactionAborted,
    UnknownTransaction,
)
from txmq.testing.wait import wait_until
from txmq.tx.group import GroupState
from txmq.wire.group import GroupReceipt, pack_group_receipt, unpack_part
from txmq.wire.headers import Opcode

Connect = Callable[..., Client]


class Broken(Exception):
    """What the user's code raises."""


def fail() -> None:
    raise Broken


def bodies(broker: RealBroker, topic: str) -> list[bytes]:
    return [found.body for found in broker.read(topic)]


def test_a_local_transaction_is_seen_whole(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    with client.transaction() as tx:
        tx.send("local-a", b"1", key="k")
        tx.send("local-b", b"2", key="k", tag="t", headers={"h": "v"})
        tx.send("local-a", b"3", key="k")
        tx.send_many("local-a", [b"4", b"5"], ["k", "k"])
        tx.send("local-a", b"6", key="k")
        assert "local-a" not in {topic["name"] for topic in client.call("topic.list")["topics"]}
    tx.wait_published()
    assert bodies(real, "local-a") == [b"1", b"3", b"4", b"5", b"6"]
    receipts = tx.receipts()
    assert [(got.topic, got.offset) for got in receipts] == [
        ("local-a", 0), ("local-b", 0), ("local-a", 1), ("local-a", 2), ("local-a", 3), ("local-a", 4),
    ]  # fmt: skip
    found = {message.message_id: message.body for topic in ("local-a", "local-b") for message in real.read(topic)}
    assert [found[got.message_id] for got in receipts] == [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert receipts[0].message_id.startswith(tx.token.hex)


def test_a_block_that_raises_sends_nothing(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    tx = client.transaction()
    with suppress(Broken), tx:
        tx.send("nothing", b"x")
        fail()
    with pytest.raises(LocalProtocolError):
        tx.wait_published()
    assert client.call("tx.list", state="undecided")["transactions"] == []


def test_a_transaction_marked_to_be_rolled_back_cannot_commit(real: RealBroker, connect: Connect) -> None:
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
    tx.wait_published()
    assert tx.receipts() == []
    assert fake.accepted == 0


def test_a_savepoint_takes_back_what_came_after_it(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    with client.transaction() as tx:
        tx.send("savepoints", b"1", key="k")
        with suppress(Broken), tx.savepoint():
            tx.send("savepoints", b"not this", key="k")
            fail()
        with tx.savepoint():
            tx.send("savepoints", b"2", key="k")
    assert bodies(real, "savepoints") == [b"1", b"2"]


def test_a_transaction_is_for_one_use_and_inside_its_block(real: RealBroker, connect: Connect) -> None:
    tx = connect(real.url).transaction()
    with pytest.raises(LocalProtocolError, match="has not begun"):
        tx.send("t", b"x")
    with tx:
        pass
    for call in (lambda: tx.send("t", b"x"), lambda: tx.act(("x",)), tx.__enter__):
        with pytest.raises(ClientClosed, match="is over"):
            call()


def test_a_local_transaction_larger_than_a_frame_goes_in_parts(real: RealBroker, connect: Connect) -> None:
    with connect(real.url).transaction() as tx:
        tx.send_many("large", [b"x" * (4 << 20)] * 5, partition=0)
    tx.wait_published()
    assert [receipt.offset for receipt in tx.receipts()] == [0, 1, 2, 3, 4]


def test_a_grown_topic_is_found_out_and_the_group_is_built_again(real: RealBroker, connect: Connect) -> None:
    client, other = connect(real.url), connect(real.url)
    client.send("grown", b"before", key="k")
    other.call("topic.grow", name="grown", partitions=32)
    with client.transaction() as tx:
        for n in range(64):
            tx.send("grown", b"x", key=f"k{n}")
    tx.wait_published()
    assert {got.partition for got in tx.receipts()} - set(range(8))


def test_a_group_whose_answer_is_lost_is_stored_once(real: RealBroker, connect: Connect) -> None:
    with Proxy(real.url) as proxy:
        proxy.lose[Opcode.GROUP] = 2
        with connect(proxy.url).transaction() as tx:
            tx.send("once", b"x")
    assert bodies(real, "once") == [b"x"]
    assert tx.token.hex


def test_where_no_answer_comes_the_broker_is_asked_what_became_of_it(real: RealBroker, connect: Connect) -> None:
    with Proxy(real.url) as proxy:
        proxy.hold.add(Opcode.GROUP)
        with connect(proxy.url).transaction(timeout=0.3) as tx:
            tx.send("asked", b"x")
    assert bodies(real, "asked") == [b"x"]
    assert tx.token.version == 7


def test_a_transaction_that_nobody_knows_the_end_of_is_in_doubt(real: RealBroker, connect: Connect) -> None:
    with Proxy(real.url) as proxy:
        client = connect(proxy.url)
        client.send("doubt", b"first")
        proxy.hold |= {Opcode.GROUP, Opcode.CALL}
        with pytest.raises(InDoubt) as caught, client.transaction(timeout=0.3) as tx:
            tx.send("doubt", b"x")
    assert (caught.value.outcome, caught.value.token) == ("unknown", str(tx.token))


def test_a_half_message_is_hidden_until_the_local_work_is_done(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    with client.transaction(checker="billing") as tx:
        tx.send("halves", b"half", key="k")
        tx.prepare()
        assert bodies(real, "halves") == []
        with pytest.raises(LocalProtocolError, match="is stored"):
            tx.send("halves", b"late")
    tx.wait_published()
    assert bodies(real, "halves") == [b"half"]


def test_local_work_that_fails_takes_the_half_message_back(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    tx = client.transaction(checker="billing")
    with suppress(Broken), tx:
        tx.send("halves-back", b"half")
        tx.prepare()
        fail()
    assert client.call("tx.show", token=tx.token.hex)["state"] == "ROLLED_BACK"
    assert bodies(real, "halves-back") == []


def test_a_half_message_that_was_not_prepared_is_stored_at_the_end(real: RealBroker, connect: Connect) -> None:
    with connect(real.url).transaction(checker="billing") as tx:
        tx.send("unprepared", b"half")
    tx.wait_published()
    assert bodies(real, "unprepared") == [b"half"]


def test_a_decision_whose_answer_is_lost_is_made_once(real: RealBroker, connect: Connect) -> None:
    with Proxy(real.url) as proxy:
        proxy.lose[Opcode.DECIDE] = 2
        with connect(proxy.url).transaction(checker="billing") as tx:
            tx.send("decided", b"x")
            tx.prepare()
    assert bodies(real, "decided") == [b"x"]
    shown = connect(real.url).call("tx.show", token=tx.token.hex)
    assert (shown["state"], shown["by"]) == ("PUBLISHED", "producer orders")


def test_a_send_behind_an_undecided_half_of_its_key_waits_for_it(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    with client.transaction(checker="billing") as tx:
        tx.send("held", b"half", key="k")
        tx.prepare()
        assert client.send("held", b"behind", key="k").offset is None
        assert client.send_async("held", b"behind too", key="k").result(10).offset is None
        assert client.send_many("held", [b"other"], ["other"])[0].offset is not None
    tx.wait_published()
    assert [found.body for found in real.read("held") if found.key == "k"] == [b"half", b"behind", b"behind too"]


@pytest.mark.parametrize(("answer", "left"), [(txmq.COMMIT, [b"half"]), (txmq.ROLLBACK, [])])
def test_a_registered_checker_decides_what_its_producer_did_not(
    real: RealBroker, connect: Connect, answer: txmq.Decision, left: list[bytes]
) -> None:
    asked: list[Half] = []

    def check(half: Half) -> txmq.Decision:
        asked.append(half)
        if len(asked) == 1:
            raise ValueError("not today")
        return txmq.UNKNOWN if len(asked) == 2 else answer

    topic, service = f"checked-{answer.name}", f"service-{answer.name}"
    client = connect(real.url, service=service)
    client.register_checker("billing", check)
    dead = connect(real.url, service=service).transaction(checker="billing", check_after=0.05)
    with dead:
        dead.send(topic, b"half", key="k", tag="t", headers={"a": "b"})
        dead.prepare()
        _show = client.core.call
        wait_until(lambda: _show("tx.show", {"token": dead.token.hex})["state"] in ("PUBLISHED", "ROLLED_BACK"), 20)
        dead._share.buffer.clear()  # as if this process had died here
    assert bodies(real, topic) == left
    assert len(asked) == 3
    half = asked[0]
    assert (half.token, half.checker, half.service) == (dead.token, "billing", service)
    [message] = half.messages
    assert message == (topic, f"{dead.token.hex}-0", "k", "t", {"a": "b"}, b"half")


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (ValueError("no \udcff today"), "checker sulking raised ValueError: no ? today"),
        (True, "checker sulking gave a value of type bool, which is no answer"),
        (txmq.UNKNOWN, "checker sulking says UNKNOWN"),
    ],
)
def test_the_broker_is_told_why_a_checker_gave_no_answer(
    real: RealBroker, connect: Connect, outcome: object, told: str
) -> None:
    def check(half: Half) -> Any:
        del half
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    client = connect(real.url, service="sulking")
    client.register_checker("sulking", check)
    with client.transaction(checker="sulking", check_after=0.05) as tx:
        tx.send("sulks", b"x")
        tx.prepare()
        wait_until(lambda: client.call("tx.show", token=tx.token.hex)["check_reason"] == told, 20)
        assert client.call("tx.show", token=tx.token.hex)["checked_by"] == "checker"


def test_an_answer_of_another_type_is_none_and_another_checker_may_give_it(real: RealBroker, connect: Connect) -> None:
    wrong: list[object] = []

    def unsure(half: Half) -> txmq.Decision:
        wrong.append(half)
        return True  # type: ignore[return-value]  # what a user might write

    client = connect(real.url, service="two-checkers")
    client.register_checker("unsure", unsure)
    client.register_checker("sure", lambda _half: txmq.COMMIT)
    tokens = []
    for checker in ("unsure", "sure"):
        with client.transaction(checker=checker, check_after=0.05) as tx:
            tx.send("two", checker.encode())
            tx.prepare()
            tokens.append(tx.token.hex)
            wait_until(lambda: wrong, 20)
            if checker == "sure":
                wait_until(lambda: client.call("tx.show", token=tokens[1])["state"] == "PUBLISHED", 20)
            tx._share.buffer.clear()  # as if this process had died here
    assert client.call("tx.show", token=tokens[0])["state"] == "UNDECIDED"
    client.call("tx.decide", token=tokens[0], outcome="ROLLBACK", operator="test", reason="tidy up")


def test_a_decision_against_the_checkers_is_an_abort(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    tx = client.transaction(checker="billing")
    tx.__enter__()
    tx.send("against", b"x")
    tx.prepare()
    client.call("tx.decide", token=tx.token.hex, outcome="ROLLBACK", operator="test", reason="a test")
    with pytest.raises(TransactionAborted, match="ROLLED_BACK"):
        tx.__exit__(None, None, None)
    assert bodies(real, "against") == []


def test_checkers_need_a_service(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url, service=None)
    with pytest.raises(ConfigError, match="service"):
        client.register_checker("billing", lambda _half: txmq.COMMIT)
    with pytest.raises(ConfigError, match="service"):
        client.transaction(checker="billing")


def test_what_cannot_be_is_refused_before_it_begins(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    wrong: list[dict[str, Any]] = [
        {"on_unavailable": "outbox"}, {"timeout": 0}, {"check_after": -1}, {"colour": "red"}, {"checker": "no name"},
        {"checker": "billing", "connection": object()}, {"connection": object()},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises((ConfigError, LocalProtocolError)), client.transaction(**options):
            pass
    with client.transaction() as tx, pytest.raises(LocalProtocolError, match="consumer"):
        tx.ack("no message")
    assert fake.accepted == 0


class Consumer:
    """What a transaction asks of a consumer."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def ack_actions(self, delivered: object) -> list[tuple[object, ...]]:
        self.log.append("asked")
        return [("ack", "group", "member", 1, "orders", 0, 5, 6)]

    def transaction_over(self, delivered: object, *, committed: bool | None) -> None:
        self.log.append(committed)


class Delivered:
    """A message, as far as a transaction looks at it."""

    def __init__(self, owner: Consumer) -> None:
        self.parcel = self
        self.owner = owner


def test_acks_travel_with_the_group_and_the_consumer_learns_the_outcome(fake: FakeBroker, connect: Connect) -> None:
    fake.others = lambda _frame: pack_group_receipt(GroupReceipt(GroupState.PUBLISHED, 1))
    client, consumer = connect(fake.url), Consumer()
    with client.transaction() as tx:
        tx.ack(Delivered(consumer))
        with suppress(Broken), tx.savepoint():
            tx.ack(Delivered(consumer))
            fail()
        tx.act(("replay", "group", "orders", 0, 9))
    part = unpack_part(fake.frames[-1].payload)
    assert part.description is not None
    assert part.description.actions == (
        ("ack", "group", "member", 1, "orders", 0, 5, 6), ("replay", "group", "orders", 0, 9),
    )  # fmt: skip
    assert consumer.log == ["asked", "asked", False, True]


def test_acks_of_a_failed_transaction_are_in_hand_again(fake: FakeBroker, connect: Connect) -> None:
    fake.others = lambda _frame: NotLeased("gone")
    client, consumer = connect(fake.url), Consumer()
    with pytest.raises(NotLeased), client.transaction() as tx:
        tx.ack(Delivered(consumer))
    with suppress(Broken), client.transaction() as tx:
        tx.ack(Delivered(consumer))
        fail()
    assert consumer.log == ["asked", False, "asked", False]


def test_what_a_stored_group_acked_is_delivered_again_when_it_is_rolled_back(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    client.send("reserved", b"1")
    with client.consumer("keeper", topics=["reserved"], retry=txmq.RetryPolicy.table(0.01)) as consumer:
        first = consumer.receive(10)
        assert first is not None
        with suppress(Broken), client.transaction(checker="billing") as tx:
            tx.ack(first)
            tx.prepare()
            fail()
        assert not consumer.holds(first)
        again = consumer.receive(10)
        assert again is not None
        assert (again.body, again.attempt) == (b"1", 2)
        consumer.ack(again)


def test_a_message_and_what_comes_of_it_are_one_decision(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    client.send_batch("raw", [txmq.Message(str(n).encode(), key="k") for n in range(3)])
    with client.consumer("cook", topics=["raw"], mode="ordered") as consumer:
        for n in range(3):
            message = consumer.receive(20)
            assert message is not None
            with suppress(Broken), client.transaction() as tx:
                tx.send("cooked", message.body, key="k")
                tx.ack(message)
                if n == 1:
                    fail()
            if n == 1:
                consumer.ack(message)
    assert bodies(real, "cooked") == [b"0", b"2"]
    with client.consumer("cook", topics=["raw"], mode="ordered") as consumer:
        assert consumer.receive(0.3) is None


def test_a_job_publishes_the_groups_of_its_winners_and_no_others(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    job = client.job()
    first = job.store("job", [txmq.Message(b"1", key="k"), txmq.Message(b"2", key="k")])
    job.store("job", [txmq.Message(b"a lost attempt", key="k")])
    second = job.store("job", [txmq.Message(b"3", key="k")])
    assert (job.outcome(), bodies(real, "job")) == (None, [])
    assert job.decide([first, second]) == (txmq.COMMIT, False)
    assert client.job(job.token.hex).decide([second]) == (txmq.COMMIT, True)
    assert client.job(job.token.bytes).abort() == (txmq.COMMIT, True)
    assert job.outcome() is txmq.COMMIT
    job.store("job", [txmq.Message(b"too late", key="k")])
    assert bodies(real, "job") == [b"1", b"2", b"3"]


def test_an_aborted_job_sends_nothing(real: RealBroker, connect: Connect) -> None:
    job = connect(real.url).job()
    job.store("aborted", [txmq.Message(b"x")])
    assert job.abort() == (txmq.ROLLBACK, False)
    assert bodies(real, "aborted") == []


def test_a_job_cannot_win_with_a_group_that_is_not_stored(real: RealBroker, connect: Connect) -> None:
    job = connect(real.url).job()
    with pytest.raises(UnknownTransaction):
        job.decide([new_token()])
    assert job.outcome() is None


def test_a_group_of_a_job_may_be_larger_than_a_frame(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url, timeout=30)
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


def test_a_half_message_may_be_larger_than_a_frame(real: RealBroker, connect: Connect) -> None:
    with connect(real.url, timeout=30).transaction(checker="billing") as tx:
        for n in range(20):
            tx.send("big-half", b"x" * (1 << 20), key=f"k{n}")
    tx.wait_published()
    assert len(tx.receipts()) == len(real.read("big-half")) == 20


def test_tokens_are_told_apart_by_time_and_read_in_every_form() -> None:
    tokens = [new_token() for _ in range(50)]
    assert len(set(tokens)) == 50
    assert {token.version for token in tokens} == {7}
    milliseconds = [token.int >> 80 for token in tokens]
    assert milliseconds == sorted(milliseconds)
    assert {as_token(tokens[0].hex), as_token(tokens[0].bytes), as_token(str(tokens[0]))} == {tokens[0]}
