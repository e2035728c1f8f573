"""Frames of many groups or many decisions: one flush, one reply, and each request
answered for itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import Broker, Client, Oracle, welcome, writes
from txmq import errors
from txmq.batch import encode
from txmq.core.events.transactions import Decided
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.instances import RegisterInstance
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message
from txmq.wire.frames import encode_frame
from txmq.wire.group import (
    Description,
    Part,
    PartBatch,
    group_digest,
    pack_part,
    unpack_group_receipt,
)
from txmq.wire.headers import Decide, Opcode, pack_decide, unpack_decide_receipt
from txmq.wire.hello import Hello
from txmq.wire.status import to_error
from txmq.wire.together import FEATURE, pack_requests, unpack_answers

CHECKER = ("checker", "bank")


@pytest.fixture
def broker() -> Broker:
    broker = Broker()
    broker.do(CreateTopic("t", 1))
    return broker


def group(
    broker: Broker, number: int, *, topic: str = "t", body: bytes = b"m", decider: Any = CHECKER
) -> bytes:
    token = broker.token(number)
    batch = encode([Message(body, f"k{number}")], producer_id=token, epoch=0, sequence=0, born_at=1)
    part = Part(
        token,
        0,
        0,
        True,
        decider == ("local",),
        b"",
        Description(decider, "s"),
        (PartBatch(topic, 0, 0, batch),),
    )
    return b"".join(pack_part(part._replace(digest=group_digest([part]))))


def decision(broker: Broker, number: int, outcome: Decision = COMMIT) -> bytes:
    return pack_decide(Decide(outcome, broker.token(number), 0, "s"))


def together(client: Client, opcode: Opcode, *payloads: bytes) -> list[object]:
    """What became of each: where its group stands, or the error's type."""
    unpack: Any = unpack_group_receipt if opcode == Opcode.GROUPS else unpack_decide_receipt
    answers = unpack_answers(client.ask(opcode, b"".join(pack_requests(payloads))).payload)
    return [
        type(to_error(*a)) if a.status else GroupState(unpack(a.payload).state) for a in answers
    ]


def test_the_welcome_says_that_the_broker_takes_them(broker: Broker) -> None:
    assert FEATURE in welcome(broker).features


def test_all_of_a_frame_is_brought_to_disk_at_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = writes(broker, monkeypatch)
    client = broker.connect()
    stored = together(client, Opcode.GROUPS, *(group(broker, number) for number in range(20)))
    assert stored == [GroupState.UNDECIDED] * 20
    decided = together(
        client, Opcode.DECISIONS, *(decision(broker, number) for number in range(20))
    )
    assert decided == [GroupState.PUBLISHED] * 20
    assert len(flushes) == 2


def test_each_request_of_a_frame_is_answered_in_its_place(broker: Broker) -> None:
    client = broker.connect()
    half = bytearray(group(broker, 9))
    half[-20] ^= 1
    mixed = (
        group(broker, 1), group(broker, 2, topic="none"), bytes(half), group(broker, 3, decider=("local",)), b"?",
        group(broker, 1), group(broker, 1, body=b"other"), group(broker, 4, decider=("postgres", 1, 1, 5, None)),
        group(broker, 5),
    )  # fmt: skip
    assert together(client, Opcode.GROUPS, *mixed) == [
        GroupState.UNDECIDED, errors.UnknownTopic, errors.BadRequest, GroupState.PUBLISHED, errors.BadRequest,
        GroupState.UNDECIDED, errors.DigestMismatch, errors.NoResolver, GroupState.UNDECIDED,
    ]  # fmt: skip
    verdicts = (
        decision(broker, 5, ROLLBACK),
        b"",
        decision(broker, 5),
        decision(broker, 8),
        decision(broker, 1),
    )
    assert together(client, Opcode.DECISIONS, *verdicts) == [
        GroupState.ROLLED_BACK, errors.BadRequest, errors.Conflict, errors.UnknownTransaction, GroupState.PUBLISHED,
    ]  # fmt: skip


def test_an_older_incarnation_is_refused_what_is_new_and_told_of_what_it_has_stored(
    broker: Broker,
) -> None:
    epoch = broker.do(RegisterInstance("s", "one"))
    hello = Hello(versions=(1, 1), client="test", service="s", instance="one", incarnation=epoch)
    client = broker.connect(encode_frame(Opcode.HELLO, 1, hello.encode()))
    assert (
        together(client, Opcode.GROUPS, group(broker, 1), group(broker, 2))
        == [GroupState.UNDECIDED] * 2
    )
    broker.do(RegisterInstance("s", "one"))
    again = together(client, Opcode.GROUPS, group(broker, 3), group(broker, 2), group(broker, 4))
    assert again == [errors.ProducerFenced, GroupState.UNDECIDED, errors.ProducerFenced]
    assert (
        together(client, Opcode.DECISIONS, decision(broker, 1), decision(broker, 2))
        == [GroupState.PUBLISHED] * 2
    )


def test_a_disk_that_runs_full_refuses_new_groups_but_tells_of_those_that_are_stored(
    broker: Broker,
) -> None:
    client = broker.connect()
    together(client, Opcode.GROUPS, group(broker, 1), group(broker, 2))
    broker.engine.disk.refusing = True
    again = together(client, Opcode.GROUPS, group(broker, 3), group(broker, 1), group(broker, 4))
    assert again == [errors.ReadOnly, GroupState.UNDECIDED, errors.ReadOnly]
    assert (
        together(client, Opcode.DECISIONS, decision(broker, 1), decision(broker, 2))
        == [GroupState.PUBLISHED] * 2
    )


def test_whoever_follows_decisions_hears_of_each() -> None:
    broker = Broker(Oracle())
    broker.do(CreateTopic("t", 1))
    client, heard = broker.connect(), []
    broker.engine.listen(Decided, lambda event, _place: heard.append(event.token))
    together(client, Opcode.GROUPS, *(group(broker, number) for number in range(3)))
    together(client, Opcode.DECISIONS, *(decision(broker, number) for number in range(3)))
    assert heard == [broker.token(number) for number in range(3)]


def test_a_frame_that_cannot_be_taken_apart_is_refused_as_a_whole(broker: Broker) -> None:
    client = broker.connect()
    for opcode in (Opcode.GROUPS, Opcode.DECISIONS):
        client.send(encode_frame(opcode, 7, b"\1\0\0\0\5\0\0\0abc"))
        assert type(client.refusal()) is errors.BadRequest
