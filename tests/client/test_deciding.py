"""Decisions that nobody waits for: answered by the way, and told again wherever that
fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from tests.client.fake import FakeBroker, HangUp, Silent
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.decisions import tell
from txmq.errors import ClientClosed, Conflict
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT
from txmq.testing.wait import wait_until
from txmq.wire.headers import DecideReceipt, Opcode, pack_decide_receipt, unpack_decide

Connect = Callable[..., Client]
DEADLINE_S = 20
TOKEN = UUID(int=7)
DONE = pack_decide_receipt(DecideReceipt(GroupState.PUBLISHED, repeated=False))


def decided(fake: FakeBroker) -> list[bytes]:
    """The tokens of the decisions that came."""
    return [
        unpack_decide(frame.payload).token
        for frame in list(fake.frames)
        if frame.opcode == Opcode.DECIDE
    ]


@pytest.fixture
def client(fake: FakeBroker, connect: Connect) -> Client:
    """One that has a connection at hand, and gives a silent one up before long."""
    fake.others = lambda _frame: DONE
    client = connect(fake.url, timeout=0.5)
    client.send("orders", b"first")
    return client


def test_a_decision_goes_out_on_the_connection_at_hand_and_its_answer_comes_with_a_later_reply(
    fake: FakeBroker, client: Client
) -> None:
    told = tell(client.core, TOKEN, COMMIT)
    client.send("orders", b"second")
    assert told.answered
    assert told.result(0) == DONE
    assert (fake.accepted, decided(fake)) == (1, [TOKEN.bytes])


def test_whoever_asks_for_the_answer_reads_it(fake: FakeBroker, client: Client) -> None:
    assert tell(client.core, TOKEN, COMMIT).result(DEADLINE_S) == DONE
    assert (fake.accepted, decided(fake)) == (1, [TOKEN.bytes])


def test_an_answer_that_no_reply_follows_is_read_all_the_same(
    fake: FakeBroker, client: Client
) -> None:
    told = tell(client.core, TOKEN, COMMIT)
    wait_until(lambda: told.answered, DEADLINE_S)
    assert (fake.accepted, decided(fake)) == (1, [TOKEN.bytes])
    client.send("orders", b"second")
    assert fake.accepted == 1


@pytest.mark.parametrize("first", [HangUp, Silent])
def test_a_decision_whose_answer_is_lost_is_told_again(
    fake: FakeBroker, client: Client, first: Any
) -> None:
    answers = [first, first]
    fake.others = lambda _frame: answers.pop() if answers else DONE
    told = tell(client.core, TOKEN, COMMIT)
    wait_until(lambda: len(decided(fake)) >= 3, DEADLINE_S)
    assert told.result(DEADLINE_S) == DONE
    assert set(decided(fake)) == {TOKEN.bytes}


def test_without_a_connection_at_hand_the_pipeline_sends_it(
    fake: FakeBroker, connect: Connect
) -> None:
    fake.others = lambda _frame: DONE
    assert tell(connect(fake.url).core, TOKEN, COMMIT).result(DEADLINE_S) == DONE


def test_a_connection_that_the_broker_has_closed_is_not_trusted(
    fake: FakeBroker, client: Client
) -> None:
    fake.hang_up()
    assert tell(client.core, TOKEN, COMMIT).result(DEADLINE_S) == DONE


def test_a_refusal_is_an_answer(fake: FakeBroker, client: Client) -> None:
    fake.others = lambda _frame: Conflict("it was rolled back")
    told = tell(client.core, TOKEN, COMMIT)
    with pytest.raises(Conflict):
        told.result(DEADLINE_S)
    assert decided(fake) == [TOKEN.bytes]


@pytest.mark.parametrize("ends", [Client.flush, Client.close])
def test_nothing_is_left_open_at_the_end(
    fake: FakeBroker, client: Client, ends: Callable[[Client], None]
) -> None:
    answers: list[Any] = [HangUp]
    fake.others = lambda _frame: answers.pop() if answers else DONE
    told = [tell(client.core, UUID(int=n), COMMIT) for n in range(3)]
    ends(client)
    assert [one.result(0) for one in told] == [DONE] * 3


def test_a_client_that_was_closed_tells_nothing(client: Client) -> None:
    client.close()
    with pytest.raises(ClientClosed):
        tell(client.core, TOKEN, COMMIT)


def test_what_a_parent_told_is_not_its_childs_concern(fake: FakeBroker, client: Client) -> None:
    answers: list[Any] = [Silent]
    fake.others = lambda _frame: answers.pop() if answers else DONE
    tell(client.core, TOKEN, COMMIT)
    wait_until(lambda: not answers, DEADLINE_S)
    pid = os.fork()
    if not pid:  # nothing of pytest may run here
        try:
            tell(client.core, UUID(int=8), COMMIT).result(DEADLINE_S)
            client.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    wait_until(lambda: decided(fake).count(TOKEN.bytes) == 2, DEADLINE_S)
    assert decided(fake).count(UUID(int=8).bytes) == 1
