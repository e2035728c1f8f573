"""Half messages with a checker, against the real broker."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import txmq
from tests.client.proxy import Proxy
from tests.client.real import RealBroker, bodies
from tests.client.world import ApplicationError, fail
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.protocol.transaction.checks import Half
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.client.protocol.transaction.open_work import REASON, end_work, is_open
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, InDoubt, LocalProtocolError, TransactionAborted
from txmq.testing.forked import run_source
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.data_requests import Opcode

Connect = Callable[..., Client]


def test_a_half_message_is_hidden_until_the_local_work_is_done(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    with client.transaction(checker="billing") as tx:
        tx.send("halves", b"half", key="k")
        tx.prepare()
        assert bodies(real, "halves") == []
        with pytest.raises(LocalProtocolError, match="is stored"):
            tx.send("halves", b"late")
    tx.wait_published(PATIENCE_S)
    assert bodies(real, "halves") == [b"half"]


def test_local_work_that_fails_rolls_the_half_message_back(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    tx = client.transaction(checker="billing")
    with suppress(ApplicationError), tx:
        tx.send("halves-back", b"half")
        tx.prepare()
        fail()
    assert client.call("tx.show", token=tx.token.hex)["state"] == "ROLLED_BACK"
    assert bodies(real, "halves-back") == []


def test_a_half_message_that_was_not_prepared_is_stored_at_the_end(
    real: RealBroker, connect: Connect
) -> None:
    with connect(real.url).transaction(checker="billing") as tx:
        tx.send("unprepared", b"half")
    tx.wait_published(PATIENCE_S)
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


def test_a_send_behind_an_undecided_half_of_its_key_waits_for_it(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    with client.transaction(checker="billing") as tx:
        tx.send("held", b"half", key="k")
        tx.prepare()
        assert client.send("held", b"behind", key="k").offset is None
        assert client.send_async("held", b"behind too", key="k").result(PATIENCE_S).offset is None
        assert client.send_many("held", [b"other"], ["other"])[0].offset is not None
    tx.wait_published(PATIENCE_S)
    assert [found.body for found in real.read("held") if found.key == "k"] == [
        b"half",
        b"behind",
        b"behind too",
    ]


def die(tx: HalfTransaction) -> None:
    """Leave a block as if this process had died in it: it decides nothing."""
    tx._stored = None
    tx._bundle.buffer.clear()


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
        end_work(dead.token)  # as if this process had died here
        _show = client._core.call
        wait_until(
            lambda: (
                _show("tx.show", {"token": dead.token.hex})["state"] in ("PUBLISHED", "ROLLED_BACK")
            ),
        )
        die(dead)
    assert bodies(real, topic) == left
    assert len(asked) == 3
    half = asked[0]
    assert (half.token, half.checker, half.service) == (dead.token, "billing", service)
    [message] = half.messages
    assert message == (topic, f"{dead.token.hex}-0", "k", "t", {"a": "b"}, b"half")


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ValueError("no \udcff today"), "checker sulking raised ValueError: no ? today"),
        (True, "checker sulking returned a value of type bool, not a Decision"),
        (txmq.UNKNOWN, "checker sulking returned UNKNOWN"),
    ],
)
def test_the_broker_gets_the_reason_why_a_checker_gave_no_answer(
    real: RealBroker, connect: Connect, outcome: object, reason: str
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
        end_work(tx.token)
        wait_until(lambda: client.call("tx.show", token=tx.token.hex)["check_reason"] == reason)
        assert client.call("tx.show", token=tx.token.hex)["checked_by"] == "checker"


def test_an_answer_of_another_type_is_none_and_another_checker_may_give_it(
    real: RealBroker, connect: Connect
) -> None:
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
            end_work(tx.token)
            tokens.append(tx.token.hex)
            wait_until(lambda: wrong)
            if checker == "sure":
                wait_until(lambda: client.call("tx.show", token=tokens[1])["state"] == "PUBLISHED")
            die(tx)
    assert client.call("tx.show", token=tokens[0])["state"] == "UNDECIDED"
    client.call("tx.decide", token=tokens[0], outcome="ROLLBACK", operator="test", reason="tidy up")


def test_a_decision_against_the_checkers_is_an_abort(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    tx = client.transaction(checker="billing")
    tx.__enter__()
    tx.send("against", b"x")
    tx.prepare()
    client.call(
        "tx.decide", token=tx.token.hex, outcome="ROLLBACK", operator="test", reason="a test"
    )
    with pytest.raises(TransactionAborted, match="ROLLED_BACK"):
        tx.__exit__(None, None, None)
    assert bodies(real, "against") == []


def test_checkers_need_a_service(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url, service=None)
    with pytest.raises(ConfigError, match="service"):
        client.register_checker("billing", lambda _half: txmq.COMMIT)
    with pytest.raises(ConfigError, match="service"):
        client.transaction(checker="billing")


def test_a_half_message_may_be_larger_than_a_frame(real: RealBroker, connect: Connect) -> None:
    with connect(real.url).transaction(checker="billing") as tx:
        for n in range(20):
            tx.send("big-half", b"x" * (1 << 20), key=f"k{n}")
    tx.wait_published(PATIENCE_S)
    assert len(tx.receipts()) == len(real.read("big-half")) == 20


def test_a_block_that_is_open_answers_unknown_by_itself(real: RealBroker, connect: Connect) -> None:
    """The checker of its own process, and that of another one, would say ROLLBACK."""
    work: list[str] = []

    def check(half: Half) -> txmq.Decision:
        del half
        return txmq.COMMIT if work else txmq.ROLLBACK

    client = connect(real.url, service="long-work")
    client.register_checker("billing", check)
    with connect(real.url, service="long-work").transaction(
        checker="billing", check_after=0.05
    ) as tx:
        tx.send("long-work", b"half")
        tx.prepare()
        wait_until(lambda: checked(client, tx.token) == REASON)
        work.append("a row")
    tx.wait_published(PATIENCE_S)
    assert bodies(real, "long-work") == [b"half"]


OTHER_PROCESS = """
import sys, threading, txmq
client = txmq.connect(sys.argv[1], service="both")
client.register_checker("billing", lambda half: txmq.ROLLBACK)
print("registered", flush=True)
threading.Event().wait()
"""


def test_other_processes_are_not_asked_while_the_block_is_open(
    real: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    client = connect(real.url, service="both")
    client.register_checker("billing", lambda _half: txmq.ROLLBACK)
    with running(tmp_path, OTHER_PROCESS, real.url, command=run_source) as other:
        assert other.first_line() == "registered"
        with client.transaction(checker="billing", check_after=0.05) as tx:
            tx.send("both", b"half")
            tx.prepare()
            before = 0
            for _ in range(8):
                wait_until(partial(answered_since, client, tx.token, before))
                before = client.call("tx.show", token=tx.token.hex)["checked_at"]
                client.call("tx.check", token=tx.token.hex)
        tx.wait_published(PATIENCE_S)
    assert bodies(real, "both") == [b"half"]


def test_an_open_block_outlives_a_restart_of_the_broker(
    own_broker: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    """Its process has not even registered the checker; another one has, and would say
    ROLLBACK.
    """
    client = connect(own_broker.url, service="both")
    with running(tmp_path, OTHER_PROCESS, own_broker.url, command=run_source) as other:
        assert other.first_line() == "registered"
        with client.transaction(checker="billing", check_after=0.05) as tx:
            tx.send("both", b"half")
            tx.prepare()
            own_broker.kill()
            own_broker.start()
            before = 0
            for _ in range(8):
                wait_until(partial(answered_since, client, tx.token, before))
                before = client.call("tx.show", token=tx.token.hex)["checked_at"]
                client.call("tx.check", token=tx.token.hex)
        tx.wait_published(PATIENCE_S)
    assert bodies(own_broker, "both") == [b"half"]


def test_a_slow_checker_does_not_hide_that_another_block_is_open(
    real: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    name, asked, ended = "slow-checker", Event(), Event()

    def check(half: Half) -> txmq.Decision:
        del half
        asked.set()
        assert ended.wait(PATIENCE_S)
        return txmq.COMMIT

    client = connect(real.url, service="both")
    client.register_checker("billing", check)
    with running(tmp_path, OTHER_PROCESS, real.url, command=run_source) as other:
        assert other.first_line() == "registered"
        slow = client.half_async(name, b"slow", checker="billing", check_after=0.05).result()
        end_work(slow.token)
        assert asked.wait(PATIENCE_S)
        with client.transaction(checker="billing", check_after=0.05) as tx:
            tx.send(name, b"half")
            tx.prepare()
            wait_until(partial(answered_since, client, tx.token, 0))
        ended.set()
        tx.wait_published(PATIENCE_S)
    assert b"half" in bodies(real, name)


def test_a_process_without_the_checker_passes_on_what_it_has_left(
    real: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    client = connect(real.url, service="both")
    with running(tmp_path, OTHER_PROCESS, real.url, command=run_source) as other:
        assert other.first_line() == "registered"
        left = client.half_async("left-over", b"half", checker="billing", check_after=0.05).result()
        end_work(left.token)
        wait_until(lambda: client.call("tx.show", token=left.token.hex)["state"] == "ROLLED_BACK")


def answered_since(client: Client, token: Any, time: int) -> bool:
    shown = client.call("tx.show", token=token.hex)
    return bool(shown["checked_at"] > time and shown["check_reason"] == REASON)


def test_a_block_that_was_left_undecided_is_asked_about(real: RealBroker, connect: Connect) -> None:
    with Proxy(real.url) as proxy:
        client = connect(proxy.url, service="left", timeout=2.0)
        connect(real.url, service="left").register_checker("billing", lambda _half: txmq.COMMIT)
        proxy.lose[Opcode.DECIDE] = 1_000
        tx = client.transaction(checker="billing", check_after=0.05, timeout=2.0)
        with suppress(InDoubt), tx:
            tx.send("left", b"half")
            tx.prepare()
    wait_until(lambda: bodies(real, "left") == [b"half"])


def test_work_is_open_until_its_end_or_as_long_as_somebody_can_end_it() -> None:
    half = HalfMessage[None](new_token(), lambda _outcome: None)
    assert is_open(half.token)
    token = half.token
    child = os.fork()
    if not child:
        os._exit(is_open(token))
    assert os.waitpid(child, 0)[1] == 0
    half.commit()
    assert not is_open(token)
    dropped = HalfMessage[None](new_token(), lambda _outcome: None)
    token = dropped.token
    del dropped
    gc.collect()
    assert not is_open(token)


def checked(client: Client, token: Any) -> object:
    return client.call("tx.show", token=token.hex)["check_reason"]
