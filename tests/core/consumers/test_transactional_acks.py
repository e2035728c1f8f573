"""Acks and replays in transactions: reserved with the half, settled by the decision."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, Received
from txmq.core.consumers.commands import (
    AbandonLetters,
    DeleteGroup,
    ExpireLeases,
    LeaveGroup,
    ReplayLetters,
    ResetPosition,
)
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import (
    BadRequest,
    NotLeased,
    RequestRejected,
    UnknownGroup,
    UnknownLetter,
    UnknownMember,
)
from txmq.model.decider import ByBroker, ByPostgres, Decider
from txmq.model.message import Decision
from txmq.model.topic_partition import TopicPartition

SECOND = 1_000_000
POSTGRES = ByPostgres(1, 1, 5, 7, 1)


@pytest.fixture
def world() -> ConsumersWorld:
    world = ConsumersWorld(t=1)
    world.publish("t", 7, 8, 9)
    world.join("a", retry=QUICK)
    world.fetch("a")
    return world


def ack(
    start: int, end: int, member: str = "a", generation: int = 1, topic: str = "t"
) -> tuple[object, ...]:
    return ("ack", "g", member, generation, topic, 0, start, end)


def store(
    world: ConsumersWorld,
    *actions: tuple[object, ...],
    number: int = 1,
    decider: Decider = POSTGRES,
) -> object:
    token = (world.now // 1_000).to_bytes(6, "big") + number.to_bytes(10, "big")
    reply = world.store(
        token, [("t", 0, None, "x")] if decider == ByBroker() else [], decider, actions=actions
    )
    return reply if isinstance(reply, RequestRejected) else token


def decide(world: ConsumersWorld, token: object, outcome: Decision = Decision.COMMIT) -> None:
    assert isinstance(token, bytes)
    world.do(DecideTransaction(token, outcome, "producer"))


def floor(world: ConsumersWorld) -> int:
    return world.group().positions[TopicPartition(1, 0)].floor


def test_an_ack_takes_effect_with_the_commit(world: ConsumersWorld) -> None:
    token = store(world, ack(0, 2))
    assert floor(world) == 0
    assert world.ack("a", (0, 2)).messages == 0, "it is the transaction's"
    decide(world, token)
    assert floor(world) == 2


def test_rolled_back_messages_are_delivered_again(world: ConsumersWorld) -> None:
    token = store(world, ack(0, 2))
    decide(world, token, Decision.ROLLBACK)
    assert floor(world) == 0
    assert world.fetch("a") == [Received("t", 0, 0, 2), Received("t", 0, 1, 2)]


def test_a_local_transaction_acks_at_once(world: ConsumersWorld) -> None:
    store(world, ack(0, 3), decider=ByBroker())
    assert floor(world) == 3


def test_reserved_messages_do_not_expire_and_outlive_member_and_broker(
    world: ConsumersWorld,
) -> None:
    token = store(world, ack(0, 2))
    world.now += 60 * SECOND
    world.do(ExpireLeases(world.now))
    assert world.offsets("a") == [2]
    world.do(LeaveGroup("g", "a", "a", lost=True))
    world.boot()
    world.join("b", retry=QUICK)
    assert world.offsets("b") == [2]
    decide(world, token)
    assert floor(world) == 2


def test_a_retry_can_be_acked_in_a_transaction(world: ConsumersWorld) -> None:
    world.nack("a", 0, delay=0)
    world.fetch("a")
    token = store(world, ack(0, 1))
    world.now += 100 * SECOND
    world.do(ExpireLeases(world.now))
    assert 0 not in world.offsets("a")
    decide(world, token, Decision.ROLLBACK)
    assert world.fetch("a") == [Received("t", 0, 0, 3)]
    decide(world, store(world, ack(0, 1), number=2))
    world.now += 100 * SECOND
    world.do(ExpireLeases(world.now))
    assert 0 not in world.offsets("a")
    assert floor(world) == 1


def test_the_head_of_a_key_can_be_acked_in_a_transaction(world: ConsumersWorld) -> None:
    world.join("o", group="o", mode="ordered", retry=QUICK)
    world.publish("t", 7)
    world.fetch("o", group="o", most=3)
    world.nack("o", 0, group="o", delay=0)
    assert world.offsets("o", group="o") == [0]
    world.ack("o", (1, 3), group="o")
    token = store(world, ("ack", "o", "o", 1, "t", 0, 0, 1))
    assert world.offsets("o", group="o") == []
    decide(world, token)
    assert world.offsets("o", group="o") == [3]
    world.ack("o", (3, 4), group="o")
    assert world.group("o").fences == {}


def test_in_an_ordered_group_another_member_waits_for_the_decision(world: ConsumersWorld) -> None:
    world.join("o", group="o", mode="ordered")
    world.fetch("o", group="o", most=2)
    token = store(world, ("ack", "o", "o", 1, "t", 0, 0, 2))
    assert world.offsets("o", group="o") == [2], "the member itself knows what it is doing"
    world.join("o", group="o", mode="ordered", instance="after a crash")
    assert world.offsets("o", group="o") == []
    decide(world, token, Decision.ROLLBACK)
    assert [world.offsets("o", group="o"), world.offsets("o", group="o")] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (ack(2, 4), NotLeased),
        (ack(1, 1), NotLeased),
        (ack(0, 1, topic="nothing"), NotLeased),
        (ack(0, 1, member="b"), UnknownMember),
        (ack(0, 1, generation=9), NotLeased),
        (("ack", "x", "a", 1, "t", 0, 0, 1), UnknownGroup),
        (("replay", "g", "t", 0, 0), UnknownLetter),
        (("replay", "x", "t", 0, 0), UnknownGroup),
        (("ack", "g", "a", 1, "t", 0), BadRequest),
        (("replay", "g", "t", 0, "0"), BadRequest),
        (("explode",), BadRequest),
        ((), BadRequest),
    ],
)
def test_a_transaction_can_only_reserve_leased_messages_and_open_letters(
    world: ConsumersWorld, action: tuple[object, ...], error: type[Exception]
) -> None:
    refused = store(world, action)
    assert type(refused) is error


def test_one_message_is_in_one_transaction(world: ConsumersWorld) -> None:
    store(world, ack(0, 2))
    refused = store(world, ack(1, 3), number=2)
    assert type(refused) is NotLeased


def test_a_replay_takes_effect_with_the_commit(world: ConsumersWorld) -> None:
    world.nack("a", 0, dead=True)
    token = store(world, ("replay", "g", "t", 0, 0))
    assert 0 not in world.offsets("a")
    why = "an undecided transaction replays it"
    assert world.do(ReplayLetters("g", (("t", 0, 0),))).refused == (("t", 0, 0, why),)
    assert world.do(AbandonLetters("g", (("t", 0, 0),), "x")).refused == (("t", 0, 0, why),)
    assert isinstance(store(world, ("replay", "g", "t", 0, 0), number=2), RequestRejected)
    decide(world, token)
    assert world.fetch("a") == [Received("t", 0, 0, 1)]
    assert world.group().letters == 0


def test_a_replay_rolled_back_leaves_the_letter(world: ConsumersWorld) -> None:
    world.nack("a", 0, dead=True)
    decide(world, store(world, ("replay", "g", "t", 0, 0)), Decision.ROLLBACK)
    assert world.group().letters == 1
    assert world.do(ReplayLetters("g", (("t", 0, 0),))).done == (("t", 0, 0),)


def test_messages_taken_by_a_reset_or_deletion_are_not_settled(world: ConsumersWorld) -> None:
    token = store(world, ack(0, 2))
    world.do(ResetPosition("g", "t", to="first"))
    decide(world, token)
    assert floor(world) == 0
    assert world.fetch("a") == [Received("t", 0, n, 1) for n in range(3)]
    token = store(world, ack(0, 2, generation=2), number=2)
    world.do(LeaveGroup("g", "a", "a"))
    world.do(DeleteGroup("g"))
    decide(world, token, Decision.ROLLBACK)
    assert world.state.groups.by_name == {}
