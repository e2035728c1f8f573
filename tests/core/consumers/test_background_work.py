"""Background work: clones, and resets and deletions that take several steps."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.core.consumers.invariants import check, moved_rows
from tests.core.consumers.world import QUICK, ConsumersWorld, rows
from tests.core.driver import token
from txmq.core import machine
from txmq.core.consumers import group_views, stall_reasons
from txmq.core.consumers.commands import (
    AbandonLetters,
    AdvanceGroupWork,
    AlterGroup,
    CloneGroup,
    DeleteGroup,
    ExpireLeases,
    LeaveGroup,
    PauseGroup,
    Rebalance,
    ReplayLetters,
    RequestedSettings,
    ResetPosition,
)
from txmq.core.consumers.letter_exports import NoteExported
from txmq.core.consumers.stall_reasons import StallContext
from txmq.core.events.topics import FirstsMoved
from txmq.core.state.failed_rows import DELIVERABLE
from txmq.core.steps import run_to_end
from txmq.core.topics import topics
from txmq.core.topics.topics import CreateTopic, DeleteTopic, GrowTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import BadRequest, Conflict, UnknownGroup
from txmq.model.decider import ByChecker
from txmq.model.message import Decision
from txmq.model.topic_partition import TopicPartition


@pytest.fixture
def world() -> ConsumersWorld:
    return ConsumersWorld(t=2, u=1)


@pytest.fixture
def failed(world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch) -> ConsumersWorld:
    """A group with ten failed messages of twelve; records change at most two.

    Two of the failed messages wait for their next delivery.
    """
    for module in ("background_work", "resets", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.STEP_ROWS", 2)
    world.publish("t", *range(12))
    world.join("a", mode="ordered")
    world.fetch("a")
    for offset in range(10):
        world.nack("a", offset, dead=offset > 1)
    return world


def run_steps(world: ConsumersWorld) -> int:
    """Run background work to its end and return its number of records.

    Recovery has to make the same state from each of them.
    """
    since = len(world.log)
    while world.do(AdvanceGroupWork()).more:
        again = world.replayed()
        assert again.groups == world.state.groups
        assert rows(again) == rows(world.state)
        machine.save(again)
        assert machine.load(again.tables).groups == world.state.groups
    return len(world.log) - since


def test_a_large_reset_takes_steps_and_delivers_nothing_meanwhile(failed: ConsumersWorld) -> None:
    world = failed
    reply = world.do(ResetPosition("g", "t", offsets=((0, 1),), reprocess=True))
    assert (reply.pending, reply.positions[0].back) == (True, 9)
    world.publish("t", 20)
    world.now += 3_600_000_000
    assert world.offsets("a") == []
    assert type(world.do(ResetPosition("g", "t", to="last"))) is Conflict
    assert type(world.do(CloneGroup("g", "h"))) is Conflict
    assert run_steps(world) == 6
    assert world.offsets("a") == [0, *range(1, 13)]
    assert (world.group().epoch, world.group().letters, len(world.group().leases)) == (2, 0, 1)
    check(world.state, world.group(), world.keys, set())


def test_a_group_with_many_failed_messages_is_deleted_in_steps(failed: ConsumersWorld) -> None:
    world = failed
    world.do(LeaveGroup("g", "a", "a"))
    world.do(DeleteGroup("g"))
    assert world.state.groups.by_name == {}
    assert world.join("b", mode="ordered").group_id == 2
    assert world.offsets("b") == list(range(12))
    assert run_steps(world) == 9
    machine.save(world.state)
    assert machine.load(world.state.tables).groups.deleted == {}
    left = rows(world.state)
    assert not any(
        left[name]
        for name in ("failed", "retries", "retries_by_time", "parked", "letters", "fences")
    )
    assert world.ack("b", (0, 12), group="g").messages == 12


def test_a_deleted_topic_ends_in_steps_with_all_that_its_groups_have_of_it(
    failed: ConsumersWorld,
) -> None:
    """Letters, retries, fences, what is parked, leased or acked by an undecided
    transaction. A topic that gets its name has nothing of it.
    """
    world = failed
    world.do(ReplayLetters("g", (("t", 0, 9),)))
    world.publish("t", 9, 9, 20, 21, 22)
    world.fetch("a")
    actions = (("ack", "g", "a", world.generation(), "t", 0, 15, 16),)
    world.store(token(world, 1), [("u", 0, None, "effect")], ByChecker("s"), actions=actions)
    before = world.group().positions[TopicPartition(1, 0)]
    assert (before.reserved.total, before.leased.total > 0) == (1, True)
    assert world.group().leased_rows
    assert rows(world.state)["parked"]
    world.do(GrowTopic("t", 3))  # the group has no position there
    assert world.do(DeleteTopic("t")).groups == ("g",)
    assert type(world.do(CloneGroup("g", "h"))) is Conflict
    world.do(CreateTopic("t", 1))
    world.publish("t", 9)
    world.do(Rebalance("g"))
    assert [one.offset for one in world.fetch("a")] == [0]
    assert run_steps(world) > 5, "two fences or rows in each record"
    left = rows(world.state)
    gone = ("failed", "retries", "retries_by_time", "parked", "letters", "letter_index",
            "letter_cells", "fences", "attempts")  # fmt: skip
    assert not any(left[name] for name in gone)
    assert (world.group().letters, world.state.groups.resetting) == (0, set())
    check(world.state, world.group(), world.keys, {(1, 0, offset) for offset in range(17)})
    world.do(DecideTransaction(token(world, 1), Decision.ROLLBACK, "test"))
    world.ack("a", (0, 1))
    check(
        world.state,
        world.group(),
        world.keys,
        {(1, 0, offset) for offset in range(17)} | {(3, 0, 0)},
    )


def test_a_topic_whose_letters_are_kept_until_an_export_has_them_is_not_deleted(
    failed: ConsumersWorld,
) -> None:
    world = failed
    world.do(AlterGroup("g", RequestedSettings(keep_until_exported=True)))
    world.do(AbandonLetters("g", (("t", 0, 2),), "of no use"))
    exported = tuple(("t", 0, offset, offset - 1, 0) for offset in range(3, 10))
    assert world.do(NoteExported("g", exported, "ada")).refused == ()
    refused = world.do(DeleteTopic("t"))
    assert (type(refused), refused.detail) == (Conflict, {"group": "g"})
    assert world.do(DeleteTopic("u")).groups == ()
    world.do(NoteExported("g", (("t", 0, 2, 1, 0),), "ada"))
    assert world.do(DeleteTopic("t")).groups == ("g",)


def test_a_topic_with_more_exported_letters_than_are_looked_at_is_not_deleted(
    failed: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = failed
    monkeypatch.setattr(topics, "MAX_LETTERS", 7)
    exported = tuple(("t", 0, offset, offset - 1, 0) for offset in range(2, 10))
    assert world.do(NoteExported("g", exported, "ada")).refused == ()
    world.do(AlterGroup("g", RequestedSettings(keep_until_exported=True)))
    assert type(world.do(DeleteTopic("t"))) is Conflict
    world.do(AlterGroup("g", RequestedSettings(keep_until_exported=False)))
    assert world.do(DeleteTopic("t")).groups == ("g",)


def test_a_clone_continues_where_its_source_is(world: ConsumersWorld) -> None:
    world.publish("t", *range(8))
    world.join("a", mode="ordered", lease_us=5_000_000)
    world.fetch("a", most=6)
    world.ack("a", (0, 1), (4, 5))
    world.nack("a", 1)
    world.nack("a", 2, dead=True)
    world.do(PauseGroup("g", paused=True))
    world.do(CloneGroup("g", "h", by="me"))
    clone = world.group("h")
    assert (clone.settings, clone.paused, clone.members, clone.letters) == (
        world.group().settings,
        True,
        {},
        0,
    )
    world.do(PauseGroup("h", paused=False))
    world.join("b", group="h", mode="ordered", lease_us=5_000_000)
    assert [(m.offset, m.attempt) for m in world.fetch("b", group="h")] == [
        (o, 1) for o in (1, 3, 5, 6, 7)
    ]
    world.ack("b", (1, 2), (3, 4), (5, 8), group="h")
    assert clone.positions[TopicPartition(1, 0)].floor == 8
    assert world.replayed().groups == world.state.groups
    assert world.group().letters == 1


@pytest.mark.parametrize(("to", "error"), [("g", Conflict), ("g@x", BadRequest)])
def test_a_clone_needs_a_name_of_its_own(
    world: ConsumersWorld, to: str, error: type[Exception]
) -> None:
    world.join("a")
    assert type(world.do(CloneGroup("g", to))) is error
    assert type(world.do(CloneGroup("x", to))) is UnknownGroup


def test_a_clone_of_many_failed_messages_takes_steps_and_delivers_nothing_meanwhile(
    failed: ConsumersWorld,
) -> None:
    world = failed
    assert world.do(CloneGroup("g", "h")).pending
    clone = world.group("h")
    world.join("b", group="h", mode="ordered")
    world.publish("t", 20)
    assert world.offsets("b", group="h") == []
    assert stall_reasons.stall_reason(
        world.state, clone, TopicPartition(1, 0), StallContext(world.end, world.now)
    ) == stall_reasons.StallReason(
        "being-cloned", "it is still being cloned from g, of which many messages have failed"
    )
    assert shown(world, "h")["state"] == "being cloned"
    for refused in (
        CloneGroup("h", "i"),
        ResetPosition("g", "t", to="last"),
        ResetPosition("h", "t", to="last"),
        DeleteGroup("g"),
    ):
        assert type(world.do(refused)) is Conflict
    assert run_steps(world) == 6
    assert world.offsets("b", group="h") == [0, 1, 10, 11, 12], (
        "two were to be retried, and eight are dead"
    )
    check(world.state, clone, world.keys, {(1, 0, offset) for offset in range(2, 10)})
    assert (
        clone.clone_progress,
        world.group().unfinished_clones,
        world.state.groups.cloning,
    ) == (
        None,
        set(),
        set(),
    )


def test_a_clone_has_messages_that_its_source_settled_before_their_step(
    failed: ConsumersWorld,
) -> None:
    """At the beginning 0, 1 and 9 wait for redelivery, 10 and 11 are leased, others are
    dead.
    """
    world = failed
    world.do(ReplayLetters("g", (("t", 0, 9),)))
    world.do(CloneGroup("g", "h"))
    world.do(AdvanceGroupWork())
    world.ack("a", (10, 11))
    world.nack("a", 11)
    world.now += 3_600_000_000
    assert sorted(world.offsets("a")) == [0, 1, 9, 11]
    world.ack("a", (0, 2), (9, 10), (11, 12))
    assert run_steps(world) == 5
    world.join("b", group="h", mode="ordered")
    assert world.offsets("b", group="h") == [0, 1, 9, 10, 11]


def test_an_unfinished_clone_may_be_deleted_and_then_its_source(failed: ConsumersWorld) -> None:
    world = failed
    world.do(CloneGroup("g", "h"))
    world.do(AdvanceGroupWork())
    world.do(DeleteGroup("h"))
    assert world.group().unfinished_clones == set()
    assert world.join("b", group="h", mode="ordered").group_id == 3
    world.do(LeaveGroup("g", "a", "a"))
    world.do(DeleteGroup("g"))
    assert run_steps(world) > 0
    assert list(world.state.groups.by_name) == ["h"]


def test_messages_that_retention_has_passed_cannot_be_cloned(failed: ConsumersWorld) -> None:
    failed.record(FirstsMoved(1, ((0, 2),), ()))
    assert type(failed.do(CloneGroup("g", "i"))) is Conflict


def test_a_broadcast_group_cannot_be_cloned(failed: ConsumersWorld) -> None:
    failed.join("c", group="b", mode="broadcast")
    assert type(failed.do(CloneGroup("b", "c"))) is BadRequest


@pytest.mark.parametrize("seed", range(40))
def test_a_clone_has_all_pending_messages_of_its_beginning_while_members_work(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("background_work", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.STEP_ROWS", 2)
    random, world = Random(seed), ConsumersWorld(t=1)
    world.publish("t", *(random.randrange(4) for _ in range(14)))
    world.join("a", mode=random.choice(("ordered", "concurrent")), lease_us=5_000_000, retry=QUICK)
    for _ in range(20):
        happens(world, random)
    pending, end = unprocessed(world), world.state.topics_by_id[1].end_offsets[0]
    world.do(CloneGroup("g", "h"))
    while world.group("h").clone_progress is not None:
        happens(world, random)
        if random.random() < 0.2:
            world.do(AdvanceGroupWork())
    clone = world.group("h")
    ended = {(1, 0, offset) for offset in range(end)} - unprocessed(world, "h")
    check(world.state, clone, world.keys, ended)
    assert pending <= unprocessed(world, "h")
    assert world.replayed().groups == world.state.groups


def shown(world: ConsumersWorld, name: str) -> dict[str, Any]:
    told = run_to_end(
        group_views.describe_group(world.state, name, StallContext(world.end, world.now))
    )
    assert isinstance(told, dict)
    return told


def unprocessed(world: ConsumersWorld, name: str = "g") -> set[tuple[int, int, int]]:
    """Return the unprocessed messages of a group, without dead letters."""
    group, end = world.group(name), world.state.topics_by_id[1].end_offsets[0]
    position = group.positions[TopicPartition(1, 0)]
    live = {
        piece[:2]
        for pieces in (position.leased, position.redeliver, position.reserved)
        for piece in pieces
    }
    offsets = {
        offset for start, end in (*live, (position.cursor, end)) for offset in range(start, end)
    }
    rows = {ref for ref, row in moved_rows(world.state, group).items() if row.kind in DELIVERABLE}
    return rows | {(1, 0, offset) for offset in offsets}


@pytest.mark.parametrize("seed", range(40))
def test_a_reset_ends_as_requested_while_members_work(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("background_work", "resets", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.STEP_ROWS", 2)
    random, world = Random(seed), ConsumersWorld(t=1)
    world.publish("t", *(random.randrange(4) for _ in range(14)))
    world.join("a", mode=random.choice(("ordered", "concurrent")), lease_us=5_000_000)
    for _ in range(20):
        happens(world, random)
    offset = random.randrange(14)
    world.do(ResetPosition("g", "t", offsets=((0, offset),)))
    while world.group().pending_resets:
        happens(world, random)
        if random.random() < 0.3:
            world.do(AdvanceGroupWork())
    rows_left = moved_rows(world.state, world.group())
    below = {(1, 0, number) for number in range(offset)}
    assert rows_left.keys() <= below
    check(world.state, world.group(), world.keys, below - rows_left.keys())
    assert world.replayed().groups == world.state.groups
    fresh = world.group().positions[TopicPartition(1, 0)]
    assert (fresh.floor, fresh.cursor) == (offset, offset)


def happens(world: ConsumersWorld, random: Random) -> None:
    """Let a member act, or time pass."""
    group = world.group()
    leased = [
        number
        for piece in group.positions[TopicPartition(1, 0)].leased
        for number in range(piece.start, piece.end)
    ]
    held = leased + [ref[2] for ref in group.leased_rows]
    how = random.random()
    if how < 0.3 or not held:
        world.fetch("a", most=random.randint(1, 5))
    elif how < 0.5:
        one = random.choice(held)
        world.ack("a", (one, one + 1))
    elif how < 0.85:
        world.nack("a", random.choice(held), dead=random.random() < 0.5)
    elif how < 0.95:
        world.now += 2_000_000
        world.do(ExpireLeases(world.now))
    else:
        world.publish("t", random.randrange(4))
