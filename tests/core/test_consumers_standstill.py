"""Why a partition is not moving: each reason, and that there is none where it moves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.core.consumer_world import QUICK, World
from tests.core.driver import SECOND, token
from txmq.core.consumers import stall_reasons
from txmq.core.consumers.commands import Failure, GroupPause, GroupSet, Leave, ResetPosition, Wanted
from txmq.core.consumers.poison import ALONE
from txmq.core.topics.topics import DeleteTopic, GrowTopic
from txmq.model.message import Decision
from txmq.store import tables as t
from txmq.store.scan import Damage

POSTGRES = ("postgres", 1, 1, 5, 7)


@pytest.fixture
def world() -> World:
    """Two messages of one key, and an ordered group with a member that has not
    fetched.
    """
    world = World(t=1)
    world.publish("t", 1, 1)
    world.join("a", mode="ordered", retry=QUICK)
    return world


def why(
    world: World, durable: int | None = None, partition: int = 0, group: str = "g", **seen: Any
) -> str:
    look = stall_reasons.Seen(world.end if durable is None else durable, world.now, **seen)
    reason = stall_reasons.why(world.state, world.group(group), (1, partition), look)
    return "" if reason is None else f"{reason.code}: {reason.text}"


def test_a_partition_that_moves_or_is_at_its_end_has_no_reason_not_to(world: World) -> None:
    assert why(world) == ""
    world.fetch("a")
    world.ack("a", (0, 2))
    assert why(world) == ""


def test_its_topic_may_be_gone_or_paused_and_so_may_the_group(world: World) -> None:
    world.do(GroupPause("g", paused=True, topic="t"))
    assert why(world) == "topic-paused: its topic is paused for the group"
    world.do(GroupPause("g", paused=True))
    assert why(world) == "paused: the group is paused"
    world.do(DeleteTopic("t"))
    assert why(world) == "deleted: the topic was deleted"


def test_it_may_be_reset_just_now(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.core.consumers.resets.SLICE", 0)
    world.fetch("a")
    world.nack("a", 0, dead=True)
    world.do(ResetPosition("g", "t", to="first"))
    assert why(world) == "being-reset: a reset brings back many failed messages"


def test_the_group_may_be_guarded() -> None:
    world = World(t=1)
    world.publish("t", 1, 2)
    world.join("a", mode="ordered", retry=QUICK, flood_keys=1)
    world.fetch("a", most=1)
    world.nack("a", 0, failure=Failure("OSError", "", "f"))
    assert why(world).endswith("the group waits until a probe succeeds (OSError)")


def test_nobody_may_read_it(world: World) -> None:
    world.do(Leave("g", "a", "a"))
    assert why(world) == "no-member: no member reads this partition"


def test_all_members_that_read_it_may_have_paused_its_topic_for_themselves(world: World) -> None:
    paused = frozenset({"t"})
    assert why(world, paused={"a": frozenset({"u"}), "b": paused}) == ""
    assert why(world, paused={"a": paused}) == "member-paused: paused by the member itself: a"
    world = World(t=1)
    world.publish("t", 1)
    world.join("a")
    world.join("b")
    assert why(world, paused={"a": paused}) == "", "the other one reads along"
    assert (
        why(world, paused={"a": paused, "b": paused})
        == "member-paused: paused by the member itself: a, b"
    )


def test_a_member_that_had_it_before_may_still_have_messages() -> None:
    world = World(t=1)
    world.publish("t", 1)
    world.join("a", mode="ordered", strategy="average")
    world.fetch("a")
    world.join("b", mode="ordered", strategy="average")
    world.now += 3 * SECOND
    assert list(world.group().members["b"].partitions) == [(1, 0)]
    assert why(world) == "held-before: leased to a, a member that had it before, for 3 s"


def test_a_transaction_may_have_acked_messages(world: World) -> None:
    world.fetch("a", most=1)
    action = ("ack", "g", "a", world.generation(), "t", 0, 0, 1)
    world.store(token(world, 1), [], POSTGRES, actions=(action,))
    assert (
        why(world)
        == f"transaction: an undecided transaction has acked messages of it: {token(world, 1).hex()}"
    )


def test_a_chain_may_be_as_long_as_it_may_be() -> None:
    world = World(t=1)
    world.publish("t", 1)
    world.join("a", mode="ordered", retry=QUICK, max_parked=0)
    world.fetch("a")
    world.nack("a", 0, dead=True)
    world.publish("t", 1)
    world.fetch("a")
    assert why(world) == "fence-full: behind a fenced key as many are parked as may be (max_parked)"


def test_what_was_sent_before_its_topic_grew_may_not_be_done_with(world: World) -> None:
    world.fetch("a")
    world.do(GrowTopic("t", 2))
    world.publish("t", 1, partition=1)
    world.join("a", mode="ordered", retry=QUICK, instance="newer")
    assert (
        why(world, partition=1)
        == "growth: what was sent before the topic grew is not all done with"
    )


def test_a_message_that_kills_waits_for_another_one() -> None:
    world = World(t=2)
    for partition in range(2):
        world.publish("t", 1, partition=partition)
    world.join("a")
    for _ in range(ALONE):
        world.fetch("a")
        world.do(Leave("g", "a", "a", lost=True))
        world.join("a")
    out = world.fetch("a")[0].partition
    assert why(world, partition=out).startswith("leased")
    what = "alone: message 0 may have killed its consumers (3) and waits for others that may have: they are out"
    assert why(world, partition=1 - out) == what


def test_a_message_that_kills_waits_until_its_member_has_nothing_else() -> None:
    world = World(t=1)
    world.publish("t", 1)
    world.join("a")
    for _ in range(ALONE):
        world.fetch("a")
        world.do(Leave("g", "a", "a", lost=True))
        world.join("a")
        assert why(world) == ""
    world.publish("t", 1)
    world.group().suspects.clear()
    assert world.offsets("a") == [1]
    what = "message 0 may have killed its consumers (3) and goes out alone, once a is done with what it has"
    assert why(world) == f"alone: {what}"


@pytest.mark.parametrize(
    ("after", "what"), [(59, "waiting for acks"), (61, "its handlers are slow, or hang")]
)
def test_handlers_may_have_all_of_it(world: World, after: int, what: str) -> None:
    world.fetch("a")
    world.now += after * SECOND
    assert why(world) == f"leased: everything is leased, to a for {after} s: {what}"


def test_as_many_may_be_ahead_as_may_be() -> None:
    world = World(t=1)
    world.publish("t", *range(9))
    world.join("a", span=4)
    assert world.offsets("a") == [0, 1, 2, 3]
    world.ack("a", (1, 4))
    assert world.offsets("a") == []
    assert (
        why(world)
        == "span: message 0 is not done with, and 4 messages from there on were delivered (span)"
    )
    world.ack("a", (0, 1))
    assert world.offsets("a") == [4, 5, 6, 7]
    world.do(GroupSet("g", Wanted(span=0)))
    assert world.offsets("a") == [8]


def test_the_next_message_may_not_be_durable(world: World) -> None:
    assert why(world, durable=0) == "not-durable: the next message is not durable yet"


def test_a_transaction_may_hold_keys_of_it(world: World) -> None:
    world.fetch("a")
    world.ack("a", (0, 2))
    held = token(world, 1)
    world.store(held, [("t", 0, "k", "x")], POSTGRES)
    told = f"undecided transactions hold keys of it, such as {held.hex()}; in the queues of these keys: 1"
    assert why(world) == f"undecided: {told}"


def test_a_large_transaction_may_be_on_its_way(world: World) -> None:
    from txmq.core.transactions.decisions import Decide

    world.fetch("a")
    world.ack("a", (0, 2))
    large = token(world, 1)
    for part in range(2):
        sends = [("t", 0, f"k{part}", "x")]
        world.store(large, sends, POSTGRES, part=part, sealed=part == 1)
    world.do(Decide(large, Decision.COMMIT, "resolver"))
    while world.advance() and not world.state.gates:
        pass
    assert world.state.gates, "it is published at a gate"
    assert why(world).startswith(
        "gate: 2 messages are seen once a large transaction is published whole"
    )
    world.work_off()
    assert why(world) == ""


def test_only_failed_messages_may_be_left(world: World) -> None:
    world.fetch("a")
    world.nack("a", 0)
    world.give_back("a", (1, 2))
    world.fetch("a")
    assert why(world) == "retrying: 1 failed messages wait for their next delivery"
    world.now += SECOND
    world.fetch("a")
    world.nack("a", 0, dead=True)
    assert why(world) == "parked: parked behind failed messages of their keys: 1 (keys: 1)"


def test_the_lag_in_time_is_that_of_the_oldest_message_not_done_with(world: World) -> None:
    oldest = world.now
    world.now += SECOND
    world.publish("t", 2)
    group = world.group()
    assert stall_reasons.oldest_waiting(world.state, group, (1, 0)) == oldest
    world.fetch("a")
    assert stall_reasons.oldest_waiting(world.state, group, (1, 0)) == oldest
    world.ack("a", (0, 2))
    assert stall_reasons.oldest_waiting(world.state, group, (1, 0)) == oldest + SECOND
    world.ack("a", (2, 3))
    assert stall_reasons.oldest_waiting(world.state, group, (1, 0)) is None


def test_the_next_message_or_the_next_that_failed_may_be_damaged(world: World) -> None:
    world.publish("t", 2)
    first, second = (t.Entry._make(row) for _key, row in world.state.entries.range(b""))

    def why_with(*spans: tuple[int, int]) -> str:
        damaged = [Damage("file", *span, "") for span in spans]
        reason = stall_reasons.why(
            world.state, world.group(), (1, 0), stall_reasons.Seen(world.end, world.now, damaged)
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
    page = (Path(__file__).parents[2] / "docs" / "CONSUMERS.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page.partition("| code |")[2], re.MULTILINE)
    explained = [code for row in rows for code in re.findall(r"`([a-z-]+)`", row)]
    codes = [rule.__name__.strip("_").replace("_", "-") for rule in stall_reasons.RULES]
    assert sorted(explained) == sorted(codes)
