"""Resets that are previewed, groups that are cloned, and what is too much for one
record: it goes on in slices.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.core.consumer_checks import check, moved_rows
from tests.core.consumer_world import QUICK, World, rows
from txmq.core import machine
from txmq.core.consumers import queries, stall_reasons
from txmq.core.consumers.commands import (
    ExpireLeases,
    GroupClone,
    GroupDelete,
    GroupPause,
    Leave,
    ReplayLetters,
    ResetPosition,
    TidyGroups,
)
from txmq.core.consumers.failed_messages import PENDING
from txmq.core.consumers.resets import Target
from txmq.core.consumers.stall_reasons import Seen
from txmq.core.events.base import FirstsMoved
from txmq.errors import BadRequest, Conflict, UnknownGroup, UnknownTopic


@pytest.fixture
def world() -> World:
    return World(t=2, u=1)


def test_a_topic_of_a_group_can_be_paused_alone(world: World) -> None:
    world.join("a", "t", "u")
    world.publish("t", 1)
    world.publish("u", 1)
    world.do(GroupPause("g", paused=True, topic="t"))
    assert [message.topic for message in world.fetch("a")] == ["u"]
    machine.save(world.state)
    world.state = machine.load(world.state.tables)
    assert world.offsets("a") == []
    world.do(GroupPause("g", paused=False, topic="t"))
    assert [message.topic for message in world.fetch("a")] == ["t"]
    assert world.do(GroupPause("g", paused=True, topic="x")).error is UnknownTopic


def test_a_preview_tells_what_would_come_again_be_skipped_and_be_brought_back(world: World) -> None:
    world.publish("t", *range(10))
    world.join("a")
    world.fetch("a", most=6)
    world.ack("a", (0, 2), (3, 4))
    world.nack("a", 4, dead=True)
    told = {
        offset: world.do(ResetPosition("g", "t", offsets=((0, offset),), dry_run=True)).positions[0]
        for offset in (0, 3, 5, 8)
    }
    assert told == {
        0: Target(0, 2, 0, again=3, skipped=0, back=1),
        3: Target(0, 2, 3, again=1, skipped=1, back=1),
        5: Target(0, 2, 5, again=0, skipped=1, back=0),
        8: Target(0, 2, 8, again=0, skipped=4, back=0),
    }


@pytest.fixture
def failed(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Ten failed messages of twelve, two of them waiting for another go; and records
    that touch two at most.
    """
    for module in ("background_work", "resets", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.SLICE", 2)
    world.publish("t", *range(12))
    world.join("a", mode="ordered")
    world.fetch("a")
    for offset in range(10):
        world.nack("a", offset, dead=offset > 1)
    return world


def sliced(world: World) -> int:
    """Tidies to the end; returns in how many records. Recovery makes the same of each
    of them.
    """
    since = len(world.log)
    while world.do(TidyGroups()).more:
        again = world.replayed()
        assert again.consumers == world.state.consumers
        assert rows(again) == rows(world.state)
        machine.save(again)
        assert machine.load(again.tables).consumers == world.state.consumers
    return len(world.log) - since


def test_a_large_reset_goes_on_in_slices_and_delivers_nothing_meanwhile(failed: World) -> None:
    world = failed
    reply = world.do(ResetPosition("g", "t", offsets=((0, 1),), reprocess=True))
    assert (reply.pending, reply.positions[0].back) == (True, 9)
    world.publish("t", 20)
    world.now += 3_600_000_000
    assert world.offsets("a") == []
    assert world.do(ResetPosition("g", "t", to="last")).error is Conflict
    assert world.do(GroupClone("g", "h")).error is Conflict
    assert sliced(world) == 6
    assert world.offsets("a") == [0, *range(1, 13)]
    assert (world.group().epoch, world.group().letters, len(world.group().leases)) == (2, 0, 1)
    check(world.state, world.group(), world.keys, set())


def test_a_group_with_very_many_failed_messages_is_deleted_in_slices(failed: World) -> None:
    world = failed
    world.do(Leave("g", "a", "a"))
    world.do(GroupDelete("g"))
    assert world.state.consumers.groups == {}
    assert world.join("b", mode="ordered").group_id == 2
    assert world.offsets("b") == list(range(12))
    assert sliced(world) == 9
    machine.save(world.state)
    assert machine.load(world.state.tables).consumers.doomed == {}
    left = rows(world.state)
    assert not any(
        left[name] for name in ("moved", "retries", "wakes", "parked", "letters", "fences")
    )
    assert world.ack("b", (0, 12), group="g").messages == 12


def test_a_clone_goes_on_where_its_group_stands(world: World) -> None:
    world.publish("t", *range(8))
    world.join("a", mode="ordered", lease_us=5_000_000)
    world.fetch("a", most=6)
    world.ack("a", (0, 1), (4, 5))
    world.nack("a", 1)
    world.nack("a", 2, dead=True)
    world.do(GroupPause("g", paused=True))
    world.do(GroupClone("g", "h", by="me"))
    clone = world.group("h")
    assert (clone.settings, clone.paused, clone.members, clone.letters) == (
        world.group().settings,
        True,
        {},
        0,
    )
    world.do(GroupPause("h", paused=False))
    world.join("b", group="h", mode="ordered", lease_us=5_000_000)
    assert [(m.offset, m.attempt) for m in world.fetch("b", group="h")] == [
        (o, 1) for o in (1, 3, 5, 6, 7)
    ]
    world.ack("b", (1, 2), (3, 4), (5, 8), group="h")
    assert clone.positions[1, 0].floor == 8
    assert world.replayed().consumers == world.state.consumers
    assert world.group().letters == 1


@pytest.mark.parametrize(("to", "error"), [("g", Conflict), ("g@x", BadRequest)])
def test_a_clone_needs_a_name_of_its_own(world: World, to: str, error: type[Exception]) -> None:
    world.join("a")
    assert world.do(GroupClone("g", to)).error is error
    assert world.do(GroupClone("x", to)).error is UnknownGroup


def test_a_clone_of_very_many_failed_messages_is_made_in_slices_and_delivers_nothing_meanwhile(
    failed: World,
) -> None:
    world = failed
    assert world.do(GroupClone("g", "h")).pending
    clone = world.group("h")
    world.join("b", group="h", mode="ordered")
    world.publish("t", 20)
    assert world.offsets("b", group="h") == []
    assert stall_reasons.why(
        world.state, clone, (1, 0), Seen(world.end, world.now)
    ) == stall_reasons.Reason(
        "being-cloned", "it is still being made from g, of which many messages have failed"
    )
    assert shown(world, "h")["state"] == "being cloned"
    for refused in (
        GroupClone("h", "i"),
        ResetPosition("g", "t", to="last"),
        ResetPosition("h", "t", to="last"),
        GroupDelete("g"),
    ):
        assert world.do(refused).error is Conflict
    assert sliced(world) == 6
    assert world.offsets("b", group="h") == [0, 1, 10, 11, 12], (
        "two were to be retried, and eight are dead"
    )
    check(world.state, clone, world.keys, {(1, 0, offset) for offset in range(2, 10)})
    assert (clone.cloning, world.group().clones, world.state.consumers.cloning) == (
        None,
        set(),
        set(),
    )


def test_of_a_clone_nothing_is_missing_that_was_done_with_before_its_slice_came(
    failed: World,
) -> None:
    """As it stood when it was begun: 0, 1 and 9 wait for another delivery, 10 and 11
    are in hand, the rest is dead.
    """
    world = failed
    world.do(ReplayLetters("g", (("t", 0, 9),)))
    world.do(GroupClone("g", "h"))
    world.do(TidyGroups())
    world.ack("a", (10, 11))
    world.nack("a", 11)
    world.now += 3_600_000_000
    assert sorted(world.offsets("a")) == [0, 1, 9, 11]
    world.ack("a", (0, 2), (9, 10), (11, 12))
    assert sliced(world) == 5
    world.join("b", group="h", mode="ordered")
    assert world.offsets("b", group="h") == [0, 1, 9, 10, 11]


def test_a_clone_that_is_being_made_may_be_deleted_and_its_source_then_too(failed: World) -> None:
    world = failed
    world.do(GroupClone("g", "h"))
    world.do(TidyGroups())
    world.do(GroupDelete("h"))
    assert world.group().clones == set()
    assert world.join("b", group="h", mode="ordered").group_id == 3
    world.do(Leave("g", "a", "a"))
    world.do(GroupDelete("g"))
    assert sliced(world) > 0
    assert list(world.state.consumers.groups) == ["h"]


def test_what_retention_has_passed_cannot_be_cloned(failed: World) -> None:
    failed.record(FirstsMoved(1, ((0, 2),), ()))
    assert failed.do(GroupClone("g", "i")).error is Conflict


def test_a_broadcast_group_cannot_be_cloned(failed: World) -> None:
    failed.join("c", group="b", mode="broadcast")
    assert failed.do(GroupClone("b", "c")).error is BadRequest


@pytest.mark.parametrize("seed", range(40))
def test_whatever_members_do_meanwhile_a_clone_has_all_that_was_not_done_with_when_it_was_begun(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("background_work", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.SLICE", 2)
    random, world = Random(seed), World(t=1)
    world.publish("t", *(random.randrange(4) for _ in range(14)))
    world.join("a", mode=random.choice(("ordered", "concurrent")), lease_us=5_000_000, retry=QUICK)
    for _ in range(20):
        happens(world, random)
    pending, end = undone(world), world.state.topics_by_id[1].ends[0]
    world.do(GroupClone("g", "h"))
    while world.group("h").cloning is not None:
        happens(world, random)
        if random.random() < 0.2:
            world.do(TidyGroups())
    clone = world.group("h")
    ended = {(1, 0, offset) for offset in range(end)} - undone(world, "h")
    check(world.state, clone, world.keys, ended)
    assert pending <= undone(world, "h")
    assert world.replayed().consumers == world.state.consumers


def shown(world: World, name: str) -> dict[str, Any]:
    told = queries.show(world.state, name, Seen(world.end, world.now))
    assert isinstance(told, dict)
    return told


def undone(world: World, name: str = "g") -> set[tuple[int, int, int]]:
    """Messages that a group has yet to be done with, but for dead letters."""
    group, end = world.group(name), world.state.topics_by_id[1].ends[0]
    position = group.positions[1, 0]
    live = {
        piece[:2]
        for pieces in (position.leased, position.redeliver, position.reserved)
        for piece in pieces
    }
    offsets = {
        offset for start, end in (*live, (position.cursor, end)) for offset in range(start, end)
    }
    rows = {
        spotted for spotted, row in moved_rows(world.state, group).items() if row.kind in PENDING
    }
    return rows | {(1, 0, offset) for offset in offsets}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_members_do_meanwhile_a_reset_ends_as_it_was_asked_for(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("background_work", "resets", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.SLICE", 2)
    random, world = Random(seed), World(t=1)
    world.publish("t", *(random.randrange(4) for _ in range(14)))
    world.join("a", mode=random.choice(("ordered", "concurrent")), lease_us=5_000_000)
    for _ in range(20):
        happens(world, random)
    offset = random.randrange(14)
    world.do(ResetPosition("g", "t", offsets=((0, offset),)))
    while world.group().resets:
        happens(world, random)
        if random.random() < 0.3:
            world.do(TidyGroups())
    rows_left = moved_rows(world.state, world.group())
    below = {(1, 0, number) for number in range(offset)}
    assert rows_left.keys() <= below
    check(world.state, world.group(), world.keys, below - rows_left.keys())
    assert world.replayed().consumers == world.state.consumers
    fresh = world.group().positions[1, 0]
    assert (fresh.floor, fresh.cursor) == (offset, offset)


def happens(world: World, random: Random) -> None:
    """Something that a member does, or time."""
    group = world.group()
    leased = [
        number for piece in group.positions[1, 0].leased for number in range(piece.start, piece.end)
    ]
    held = leased + [spotted[2] for spotted in group.held_rows]
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
        world.do(ExpireLeases())
    else:
        world.publish("t", random.randrange(4))
