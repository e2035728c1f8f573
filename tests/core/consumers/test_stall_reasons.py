"""Stall reasons: one for each partition that delivers nothing, and none otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld
from tests.core.driver import token
from txmq.core.consumers import stall_reasons
from txmq.core.consumers.commands import (
    AlterGroup,
    LeaveGroup,
    PauseGroup,
    RequestedSettings,
    ResetPosition,
)
from txmq.core.state.failed_messages import ISOLATED_AFTER
from txmq.core.topics.topics import DeleteTopic, GrowTopic
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision
from txmq.model.retry import FailureReport
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import SECOND
from txmq.store import tables as t
from txmq.store.log.decoder import Damage

POSTGRES = ByPostgres(1, 1, 5, 7, 1)


@pytest.fixture
def world() -> ConsumersWorld:
    """Two messages of one key, and an ordered group whose member has not fetched."""
    world = ConsumersWorld(t=1)
    world.publish("t", 1, 1)
    world.join("a", mode="ordered", retry=QUICK)
    return world


def why(
    world: ConsumersWorld,
    durable: int | None = None,
    partition: int = 0,
    group: str = "g",
    **seen: Any,
) -> str:
    look = stall_reasons.StallContext(world.end if durable is None else durable, world.now, **seen)
    reason = stall_reasons.stall_reason(
        world.state, world.group(group), TopicPartition(1, partition), look
    )
    return "" if reason is None else f"{reason.code}: {reason.text}"


def test_a_partition_that_delivers_or_is_at_its_end_has_no_reason(world: ConsumersWorld) -> None:
    assert why(world) == ""
    world.fetch("a")
    world.ack("a", (0, 2))
    assert why(world) == ""


def test_a_topic_may_be_deleted_closed_or_paused_and_a_group_paused(world: ConsumersWorld) -> None:
    world.do(PauseGroup("g", paused=True, topic="t"))
    assert why(world) == "topic-paused: its topic is paused for the group"
    world.do(PauseGroup("g", paused=True))
    assert why(world) == "paused: the group is paused"
    world.do(DeleteTopic("t"))
    assert why(world) == "deleted: the topic was deleted"


def test_a_group_may_be_in_a_reset(world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.core.consumers.resets.STEP_ROWS", 0)
    world.fetch("a")
    world.nack("a", 0, dead=True)
    world.do(ResetPosition("g", "t", to="first"))
    assert why(world) == "being-reset: a reset restores many failed messages"


def test_the_circuit_breaker_may_be_open() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 1, 2)
    world.join("a", mode="ordered", retry=QUICK, flood_keys=1)
    world.fetch("a", most=1)
    world.nack("a", 0, failure=FailureReport("OSError", "", "f"))
    assert why(world).endswith("the group waits until a probe succeeds (OSError)")


def test_a_partition_may_have_no_member(world: ConsumersWorld) -> None:
    world.do(LeaveGroup("g", "a", "a"))
    assert why(world) == "no-member: no member reads this partition"


def test_all_owners_may_have_paused_the_topic_for_themselves(world: ConsumersWorld) -> None:
    paused = frozenset({"t"})
    assert why(world, paused={"a": frozenset({"u"}), "b": paused}) == ""
    assert why(world, paused={"a": paused}) == "member-paused: paused by the member itself: a"
    world = ConsumersWorld(t=1)
    world.publish("t", 1)
    world.join("a")
    world.join("b")
    assert why(world, paused={"a": paused}) == "", "the other one reads along"
    assert (
        why(world, paused={"a": paused, "b": paused})
        == "member-paused: paused by the member itself: a, b"
    )


def test_a_previous_owner_may_still_hold_messages() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 1)
    world.join("a", mode="ordered", strategy="average")
    world.fetch("a")
    world.join("b", mode="ordered", strategy="average")
    world.now += 3 * SECOND
    assert list(world.group().members["b"].partitions) == [(1, 0)]
    assert why(world) == "held-before: leased to a, a member that had it before, for 3 s"


def test_a_transaction_may_have_acked_messages(world: ConsumersWorld) -> None:
    world.fetch("a", most=1)
    action = ("ack", "g", "a", world.generation(), "t", 0, 0, 1)
    world.store(token(world, 1), [], POSTGRES, actions=(action,))
    text = "an undecided transaction has acked messages of it"
    assert why(world) == f"transaction: {text}: {token(world, 1).hex()}"


def test_a_chain_may_be_full() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 1)
    world.join("a", mode="ordered", retry=QUICK, max_parked=0)
    world.fetch("a")
    world.nack("a", 0, dead=True)
    world.publish("t", 1)
    world.fetch("a")
    assert why(world) == "fence-full: a fenced key has its maximum of parked messages (max_parked)"


def test_messages_from_before_a_growth_may_be_unprocessed(world: ConsumersWorld) -> None:
    world.fetch("a")
    world.do(GrowTopic("t", 2))
    world.publish("t", 1, partition=1)
    world.join("a", mode="ordered", retry=QUICK, instance="newer")
    assert (
        why(world, partition=1)
        == "growth: messages sent before the topic grew are not all processed"
    )


def test_a_suspect_waits_for_other_suspects() -> None:
    world = ConsumersWorld(t=2)
    for partition in range(2):
        world.publish("t", 1, partition=partition)
    world.join("a")
    for _ in range(ISOLATED_AFTER):
        world.fetch("a")
        world.do(LeaveGroup("g", "a", "a", lost=True))
        world.join("a")
    out = world.fetch("a")[0].partition
    assert why(world, partition=out).startswith("leased")
    what = "message 0 may have killed its consumers (3) and waits for other suspects"
    assert why(world, partition=1 - out) == f"alone: {what}, which are leased"


def test_an_isolated_message_waits_until_its_member_holds_nothing_else() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 1)
    world.join("a")
    for _ in range(ISOLATED_AFTER):
        world.fetch("a")
        world.do(LeaveGroup("g", "a", "a", lost=True))
        world.join("a")
        assert why(world) == ""
    world.publish("t", 1)
    world.group().suspect_partitions.clear()
    assert world.offsets("a") == [1]
    what = "message 0 may have killed its consumers (3) and is delivered alone"
    assert why(world) == f"alone: {what}, once a holds nothing else"


@pytest.mark.parametrize(
    ("after", "what"), [(59, "waiting for acks"), (61, "its handlers are slow, or hang")]
)
def test_all_messages_may_be_leased(world: ConsumersWorld, after: int, what: str) -> None:
    world.fetch("a")
    world.now += after * SECOND
    assert why(world) == f"leased: everything is leased, to a for {after} s: {what}"


def test_deliveries_may_be_ahead_by_the_whole_span() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", *range(9))
    world.join("a", span=4)
    assert world.offsets("a") == [0, 1, 2, 3]
    world.ack("a", (1, 4))
    assert world.offsets("a") == []
    assert why(world) == (
        "span: message 0 is not processed, and only 4 messages from there on may be delivered"
        " (span)"
    )
    world.ack("a", (0, 1))
    assert world.offsets("a") == [4, 5, 6, 7]
    world.do(AlterGroup("g", RequestedSettings(span=0)))
    assert world.offsets("a") == [8]


def test_the_next_message_may_not_be_durable(world: ConsumersWorld) -> None:
    assert why(world, durable=0) == "not-durable: the next message is not durable yet"


def test_a_transaction_may_hold_keys_of_the_partition(world: ConsumersWorld) -> None:
    world.fetch("a")
    world.ack("a", (0, 2))
    held = token(world, 1)
    world.store(held, [("t", 0, "k", "x")], POSTGRES)
    text = f"undecided transactions hold keys of it, such as {held.hex()}"
    assert why(world) == f"undecided: {text}; in the queues of these keys: 1"


def test_a_large_transaction_may_be_in_publication(world: ConsumersWorld) -> None:
    from txmq.core.transactions.decisions import DecideTransaction

    world.fetch("a")
    world.ack("a", (0, 2))
    large = token(world, 1)
    for part in range(2):
        sends = [("t", 0, f"k{part}", "x")]
        world.store(large, sends, POSTGRES, part=part, sealed=part == 1)
    world.do(DecideTransaction(large, Decision.COMMIT, "resolver"))
    while world.advance() and not world.state.barriers:
        pass
    assert world.state.barriers, "it is published at a gate"
    assert why(world).startswith(
        "gate: a large transaction hides 2 messages until it is published whole"
    )
    world.work_off()
    assert why(world) == ""


def test_only_failed_messages_may_be_left(world: ConsumersWorld) -> None:
    world.fetch("a")
    world.nack("a", 0)
    world.return_messages("a", (1, 2))
    world.fetch("a")
    assert why(world) == "retrying: 1 failed messages wait for their next delivery"
    world.now += SECOND
    world.fetch("a")
    world.nack("a", 0, dead=True)
    assert why(world) == "parked: parked behind failed messages of their keys: 1 (keys: 1)"


def test_the_next_message_or_the_next_that_failed_may_be_damaged(world: ConsumersWorld) -> None:
    world.publish("t", 2)
    first, second = (t.BatchEntry._make(row) for _key, row in world.state.entries.range(b""))

    def why_with(*spans: tuple[int, int]) -> str:
        damaged = [Damage("file", *span, "") for span in spans]
        reason = stall_reasons.stall_reason(
            world.state,
            world.group(),
            TopicPartition(1, 0),
            stall_reasons.StallContext(world.end, world.now, damaged),
        )
        return "" if reason is None else reason.text

    assert why_with((first.position + 8, first.position + 9)).startswith("message 0 is damaged")
    assert (
        why_with((second.position, second.position + 9), (first.position - 9, first.position)) == ""
    )
    world.fetch("a", most=2)
    world.ack("a", (0, 2))
    assert why_with((second.position, second.position + 9)).startswith("message 2 is damaged")


def test_each_reason_is_explained() -> None:
    page = (Path(__file__).parents[3] / "docs" / "CONSUMERS.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page.partition("| code |")[2], re.MULTILINE)
    explained = [code for row in rows for code in re.findall(r"`([a-z-]+)`", row)]
    codes = [code for code, _rule in stall_reasons.REASONS]
    assert sorted(explained) == sorted(codes)
