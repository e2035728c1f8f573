"""Frames of many bundles or many decisions: one flush, one reply, and an answer for
each request.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, Client, FakeResolver, writes
from txmq import errors
from txmq.batch import encode
from txmq.core.events.transactions import Decided
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.instances import RegisterInstance
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker, ByChecker, ByPostgres
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message
from txmq.wire.batched import pack_requests, unpack_replies
from txmq.wire.bundle import (
    BundleDescription,
    BundlePart,
    PartBatch,
    bundle_digest,
    pack_part,
    unpack_bundle_receipt,
)
from txmq.wire.data_requests import Decide, Opcode, pack_decide, unpack_decide_receipt
from txmq.wire.frames import encode_frame
from txmq.wire.hello import Hello
from txmq.wire.status import to_error

CHECKER = ByChecker("bank")


@pytest.fixture
def broker() -> BrokerInMemory:
    broker = BrokerInMemory()
    broker.do(CreateTopic("t", 1))
    return broker


def group(
    broker: BrokerInMemory,
    number: int,
    *,
    topic: str = "t",
    body: bytes = b"m",
    decider: Any = CHECKER,
) -> bytes:
    token = broker.token(number)
    batch = encode([Message(body, f"k{number}")], producer_id=token, epoch=0, sequence=0, born_at=1)
    part = BundlePart(
        token,
        0,
        0,
        True,
        decider == ByBroker(),
        b"",
        BundleDescription(decider, "s"),
        (PartBatch(topic, 0, 0, batch),),
    )
    return b"".join(pack_part(part._replace(digest=bundle_digest([part]))))


def decision(broker: BrokerInMemory, number: int, outcome: Decision = COMMIT) -> bytes:
    return pack_decide(Decide(outcome, broker.token(number), 0, "s"))


def together(client: Client, opcode: Opcode, *payloads: bytes) -> list[object]:
    """Return the answer to each request: the state of its bundle, or the error's
    type.
    """
    unpack: Any = unpack_bundle_receipt if opcode == Opcode.GROUPS else unpack_decide_receipt
    answers = unpack_replies(client.ask(opcode, b"".join(pack_requests(payloads))).payload)
    return [
        type(to_error(*a)) if a.status else BundleState(unpack(a.payload).state) for a in answers
    ]


def test_all_of_a_frame_is_brought_to_disk_at_once(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = writes(broker, monkeypatch)
    client = broker.connect()
    stored = together(client, Opcode.GROUPS, *(group(broker, number) for number in range(20)))
    assert stored == [BundleState.UNDECIDED] * 20
    decided = together(
        client, Opcode.DECISIONS, *(decision(broker, number) for number in range(20))
    )
    assert decided == [BundleState.PUBLISHED] * 20
    assert len(flushes) == 2


def test_each_request_of_a_frame_is_answered_in_its_place(broker: BrokerInMemory) -> None:
    client = broker.connect()
    half = bytearray(group(broker, 9))
    half[-20] ^= 1
    mixed = (
        group(broker, 1),
        group(broker, 2, topic="none"),
        bytes(half),
        group(broker, 3, decider=ByBroker()),
        b"?",
        group(broker, 1),
        group(broker, 1, body=b"other"),
        group(broker, 4, decider=ByPostgres(1, 1, 5, None, 1)),
        group(broker, 5),
    )
    assert together(client, Opcode.GROUPS, *mixed) == [
        BundleState.UNDECIDED,
        errors.UnknownTopic,
        errors.BadRequest,
        BundleState.PUBLISHED,
        errors.BadRequest,
        BundleState.UNDECIDED,
        errors.DigestMismatch,
        errors.NoResolver,
        BundleState.UNDECIDED,
    ]
    verdicts = (
        decision(broker, 5, ROLLBACK),
        b"",
        decision(broker, 5),
        decision(broker, 8),
        decision(broker, 1),
    )
    assert together(client, Opcode.DECISIONS, *verdicts) == [
        BundleState.ROLLED_BACK,
        errors.BadRequest,
        errors.Conflict,
        errors.UnknownTransaction,
        BundleState.PUBLISHED,
    ]


def test_a_bundle_of_a_primary_that_was_left_behind_is_refused() -> None:
    """One that is stored already gets its receipt: its commit may be from before."""
    resolver = FakeResolver()
    broker = BrokerInMemory(resolving=resolver)
    broker.do(CreateTopic("t", 1))
    client, decider = broker.connect(), ByPostgres(1, 1, 5, None, 1)
    one, other = group(broker, 1, decider=decider), group(broker, 2, decider=decider)
    assert together(client, Opcode.GROUPS, one) == [BundleState.UNDECIDED]
    resolver.is_ahead = True
    assert together(client, Opcode.GROUPS, one, other) == [
        BundleState.UNDECIDED,
        errors.NoResolver,
    ]


def test_an_older_incarnation_stores_nothing_new_and_gets_its_old_receipts(
    broker: BrokerInMemory,
) -> None:
    epoch = broker.do(RegisterInstance("s", "one"))
    hello = Hello(versions=(1, 1), client="test", service="s", instance="one", incarnation=epoch)
    client = broker.connect(encode_frame(Opcode.HELLO, 1, hello.encode()))
    assert (
        together(client, Opcode.GROUPS, group(broker, 1), group(broker, 2))
        == [BundleState.UNDECIDED] * 2
    )
    broker.do(RegisterInstance("s", "one"))
    again = together(client, Opcode.GROUPS, group(broker, 3), group(broker, 2), group(broker, 4))
    assert again == [errors.ProducerFenced, BundleState.UNDECIDED, errors.ProducerFenced]
    assert (
        together(client, Opcode.DECISIONS, decision(broker, 1), decision(broker, 2))
        == [BundleState.PUBLISHED] * 2
    )


def test_a_disk_that_runs_full_refuses_new_groups_but_tells_of_those_that_are_stored(
    broker: BrokerInMemory,
) -> None:
    client = broker.connect()
    together(client, Opcode.GROUPS, group(broker, 1), group(broker, 2))
    broker.engine.disk.refusing = True
    again = together(client, Opcode.GROUPS, group(broker, 3), group(broker, 1), group(broker, 4))
    assert again == [errors.ReadOnly, BundleState.UNDECIDED, errors.ReadOnly]
    assert (
        together(client, Opcode.DECISIONS, decision(broker, 1), decision(broker, 2))
        == [BundleState.PUBLISHED] * 2
    )


def test_a_listener_gets_each_decision_of_a_shared_record() -> None:
    broker = BrokerInMemory(FakeResolver())
    broker.do(CreateTopic("t", 1))
    client, heard = broker.connect(), []
    broker.engine.listen(Decided, lambda event, _place: heard.append(event.token))
    together(client, Opcode.GROUPS, *(group(broker, number) for number in range(3)))
    together(client, Opcode.DECISIONS, *(decision(broker, number) for number in range(3)))
    assert heard == [broker.token(number) for number in range(3)]


def test_a_frame_that_cannot_be_taken_apart_is_refused_as_a_whole(broker: BrokerInMemory) -> None:
    client = broker.connect()
    for opcode in (Opcode.GROUPS, Opcode.DECISIONS):
        client.send(encode_frame(opcode, 7, b"\1\0\0\0\5\0\0\0abc"))
        assert type(client.refusal()) is errors.BadRequest
