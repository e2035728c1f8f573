"""Decisions without waiting: answered by later replies, repeated if that fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from tests.client.scripted_broker import FakeBroker, HangUp, Silent
from txmq.client.blocking.client import Client
from txmq.client.blocking.decision_pipeline import PendingDecision
from txmq.client.protocol.transaction.decision import decide_request
from txmq.errors import ClientClosed, Conflict
from txmq.model.bundle import BundleState, DecideReceipt
from txmq.model.message import COMMIT
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.batched import BatchedReply, pack_replies, unpack_requests
from txmq.wire.data_requests import Opcode, pack_decide_receipt, unpack_decide
from txmq.wire.frames import Frame

Connect = Callable[..., Client]
TOKEN = UUID(int=7)
DONE = pack_decide_receipt(DecideReceipt(BundleState.PUBLISHED, repeated=False))


def done(frame: Frame) -> bytes:
    """Return the reply to a decision, or to several that are repeated together."""
    if frame.opcode != Opcode.DECISIONS:
        return DONE
    count = len(unpack_requests(frame.payload))
    return b"".join(pack_replies([BatchedReply(0, DONE)] * count))


def decided(fake: FakeBroker) -> list[bytes]:
    """Return the tokens of the decisions that the broker received."""
    return [
        unpack_decide(frame.payload).token
        for frame in list(fake.frames)
        if frame.opcode == Opcode.DECIDE
    ]


def sent(client: Client, token: UUID = TOKEN) -> PendingDecision:
    request = decide_request(token, COMMIT, None)
    return client._core.decision_pipeline.send(token, COMMIT, request)


@pytest.fixture
def client(fake: FakeBroker, connect: Connect) -> Client:
    """A client with an idle connection that soon repeats unanswered decisions."""
    fake.others = lambda _frame: DONE
    client = connect(fake.url, timeout=0.5)
    client.send("orders", b"first")
    return client


def test_a_decision_goes_out_on_an_idle_connection_and_a_later_reply_brings_its_answer(
    fake: FakeBroker, client: Client
) -> None:
    pending = sent(client)
    client.send("orders", b"second")
    assert pending.answered
    assert pending.result(0) == DONE
    assert (fake.accepted, decided(fake)) == (1, [TOKEN.bytes])


def test_a_caller_that_wants_the_answer_reads_it(fake: FakeBroker, client: Client) -> None:
    assert sent(client).result(PATIENCE_S) == DONE
    assert (fake.accepted, decided(fake)) == (1, [TOKEN.bytes])


def test_an_answer_that_no_reply_follows_is_read_all_the_same(
    fake: FakeBroker, client: Client
) -> None:
    pending = sent(client)
    wait_until(lambda: pending.answered)
    assert (fake.accepted, decided(fake)) == (1, [TOKEN.bytes])
    client.send("orders", b"second")
    assert fake.accepted == 1


@pytest.mark.parametrize("first", [HangUp, Silent])
def test_a_decision_whose_answer_is_lost_is_sent_again(
    fake: FakeBroker, client: Client, first: Any
) -> None:
    answers = [first, first]
    fake.others = lambda _frame: answers.pop() if answers else DONE
    pending = sent(client)
    wait_until(lambda: len(decided(fake)) >= 3)
    assert pending.result(PATIENCE_S) == DONE
    assert set(decided(fake)) == {TOKEN.bytes}


def test_without_an_idle_connection_the_sender_sends_it(fake: FakeBroker, connect: Connect) -> None:
    fake.others = lambda _frame: DONE
    assert sent(connect(fake.url)).result(PATIENCE_S) == DONE


def test_a_connection_that_the_broker_has_closed_is_not_trusted(
    fake: FakeBroker, client: Client
) -> None:
    fake.hang_up()
    assert sent(client).result(PATIENCE_S) == DONE


def test_a_refusal_is_an_answer(fake: FakeBroker, client: Client) -> None:
    fake.others = lambda _frame: Conflict("it was rolled back")
    pending = sent(client)
    with pytest.raises(Conflict):
        pending.result(PATIENCE_S)
    assert decided(fake) == [TOKEN.bytes]


@pytest.mark.parametrize("ends", [Client.flush, Client.close])
def test_nothing_is_left_open_at_the_end(
    fake: FakeBroker, client: Client, ends: Callable[[Client], None]
) -> None:
    answers: list[Any] = [HangUp]
    fake.others = lambda frame: answers.pop() if answers else done(frame)
    pending = [sent(client, UUID(int=n)) for n in range(3)]
    ends(client)
    assert [one.result(0) for one in pending] == [DONE] * 3


def test_a_closed_client_sends_no_decision(client: Client) -> None:
    client.close()
    with pytest.raises(ClientClosed):
        sent(client)


def test_a_child_process_does_not_wait_for_its_parents_decisions(
    fake: FakeBroker, client: Client
) -> None:
    answers: list[Any] = [Silent]
    fake.others = lambda _frame: answers.pop() if answers else DONE
    sent(client)
    wait_until(lambda: not answers)
    pid = os.fork()
    if not pid:  # nothing of pytest may run here
        try:
            sent(client, UUID(int=8)).result(PATIENCE_S)
            client.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    wait_until(lambda: decided(fake).count(TOKEN.bytes) == 2)
    assert decided(fake).count(UUID(int=8).bytes) == 1
