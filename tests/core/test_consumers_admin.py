"""What operators do to consumer groups: settings, pause, reset, delete."""

from __future__ import annotations

import pytest

from tests.core.consumer_world import QUICK, World, rows
from txmq.core import machine
from txmq.core.consumers.commands import (
    GroupDelete,
    GroupPause,
    GroupSet,
    Leave,
    ResetPosition,
    Wanted,
)
from txmq.core.events.consumers import GroupChanged, GroupPaused, PositionReset
from txmq.core.state.consumer_groups import Settings
from txmq.core.state.state import Rejected
from txmq.core.topics.topics import GrowTopic
from txmq.errors import (
    BadRequest,
    Conflict,
    GroupMismatch,
    OffsetOutOfRange,
    UnknownGroup,
    UnknownTopic,
)
from txmq.model.retry import RetryPolicy


@pytest.fixture
def world() -> World:
    return World(t=2, u=1)


def test_settings_can_be_changed(world: World) -> None:
    world.join("a")
    since = len(world.log)
    world.do(GroupSet("g", Wanted(on_exhausted="block")))
    world.do(GroupSet("g", Wanted(on_exhausted="block")))
    assert world.events(since) == [
        GroupChanged(1, Settings(on_exhausted="block", altered=("on_exhausted",)))
    ]


def test_what_an_operator_set_is_given_to_members_that_ask_for_something_else(world: World) -> None:
    world.join("a", on_exhausted="skip", retry=QUICK)
    assert world.join("b", on_exhausted="park", retry=QUICK).error is GroupMismatch
    world.do(GroupSet("g", Wanted(retry=RetryPolicy((7,))), "me"))
    assert world.join("b", on_exhausted="skip", retry=QUICK).settings.policy == RetryPolicy((7,))
    assert world.join("c", on_exhausted="park", retry=QUICK).error is GroupMismatch


def test_a_paused_group_gets_nothing_and_may_still_ack(world: World) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    world.publish("t", 2)
    since = len(world.log)
    world.do(GroupPause("g", paused=True, by="me"))
    assert world.offsets("a") == []
    assert world.ack("a", (0, 1)).messages == 1
    world.do(GroupPause("g", paused=False))
    assert world.offsets("a") == [1]
    assert [e for e in world.events(since) if isinstance(e, GroupPaused)] == [
        GroupPaused(1, paused=True, by="me"),
        GroupPaused(1, paused=False, by=""),
    ]


def test_settings_and_pauses_of_a_broadcast_group_are_those_of_its_members(world: World) -> None:
    world.join("a", group="b", mode="broadcast")
    world.do(GroupSet("b", Wanted(on_exhausted="skip")))
    world.do(GroupPause("b", paused=True))
    assert (world.group("b@a").settings.on_exhausted, world.group("b@a").paused) == ("skip", True)
    assert world.do(GroupDelete("b")).error is Conflict
    world.do(Leave("b@a", "a", "a"))
    world.do(GroupDelete("b"))
    assert world.state.consumers.groups == {}


def test_a_deleted_group_leaves_nothing_behind(world: World) -> None:
    empty = rows(World(t=2, u=1).state)
    world.publish("t", 1, 1, 2)
    world.join("a", mode="ordered")
    world.fetch("a")
    world.nack("a", 0)
    world.nack("a", 2, dead=True)
    assert world.do(GroupDelete("g")).error is Conflict
    machine.save(world.state)
    world.do(Leave("g", "a", "a"))
    world.do(GroupDelete("g"))
    machine.save(world.state)
    left = {
        name: len(items)
        for name, items in rows(world.state).items()
        if len(items) > len(empty[name])
    }
    assert left.keys() <= {"topics", "entries", "producers", "groups", "meta"}
    assert left["groups"] == 1, "the numbers, so that an id is never used again"
    assert world.join("a").group_id == 2


def test_a_group_goes_on_from_where_it_is_told(world: World) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a")
    world.ack("a", (0, 3))
    since = len(world.log)
    assert world.do(ResetPosition("g", "t", offsets=((0, 1),), dry_run=True)).positions == (
        (0, 3, 1, 2, 0, 0),
    )
    assert world.events(since) == []
    world.do(ResetPosition("g", "t", offsets=((0, 1),), reprocess=True, by="me"))
    assert world.events(since) == [PositionReset(1, 1, ((0, 1),), 2, "me")]
    assert [(m.offset, m.attempt) for m in world.fetch("a")] == [(1, 1), (2, 1)]
    assert world.join("a").epoch == 2


@pytest.mark.parametrize(("to", "offsets"), [("last", ()), ("", ((0, 1), (1, 0), (2, 3)))])
def test_a_reset_without_members_moves_partitions_that_grew_since(
    world: World, to: str, offsets: tuple[tuple[int, int], ...]
) -> None:
    world.publish("t", 1)
    world.join("a")
    world.do(Leave("g", "a", "a"))
    world.do(GrowTopic("t", 3))
    world.publish("t", 1, 2, 3, partition=2)
    command = ResetPosition("g", "t", to=to, offsets=offsets)
    assert world.do(command._replace(dry_run=True)).positions[2] == (2, 0, 3, 0, 3, 0)
    world.do(command)
    world.state = world.replayed()
    world.publish("t", 4, partition=2)
    world.join("a")
    assert [(m.partition, m.offset) for m in world.fetch("a")] == [(2, 3)]


def test_a_reset_makes_what_is_under_way_stale(world: World) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a")
    world.do(ResetPosition("g", "t", to="last"))
    assert world.ack("a", (0, 3)).stale == (("t", 0, 0, 3),)
    assert world.offsets("a") == []
    assert world.group().leases == {}


def test_a_reset_brings_back_what_had_left_its_place(world: World) -> None:
    world.publish("t", 1, 1, 2, 2)
    world.join("a", mode="ordered")
    world.fetch("a", most=1)
    world.nack("a", 0)
    world.fetch("a", most=2)
    world.nack("a", 2, dead=True)
    world.fetch("a")
    assert [fence.parked for _topic, _key, fence in world.group().every_fence()] == [1, 1]
    world.do(ResetPosition("g", "t", offsets=((0, 1),)))
    assert world.offsets("a") == [2, 3]
    world.now += 10_000_000
    assert world.offsets("a") == [0]
    world.ack("a", (0, 1))
    assert world.group().letters == 0


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (ResetPosition("g", "t", offsets=((0, -1),)), OffsetOutOfRange),
        (ResetPosition("g", "t", offsets=((0, 1 << 63),)), OffsetOutOfRange),
        (ResetPosition("g", "t", offsets=((7, 0),)), OffsetOutOfRange),
        (ResetPosition("g", "t", to="middle"), BadRequest),
        (ResetPosition("g", "t"), BadRequest),
        (ResetPosition("g", "u", to="first"), UnknownTopic),
        (ResetPosition("x", "t", to="first"), UnknownGroup),
    ],
)
def test_a_reset_to_nowhere_is_refused(
    world: World, command: ResetPosition, error: type[Exception]
) -> None:
    world.join("a")
    refused = world.do(command)
    assert isinstance(refused, Rejected)
    assert refused.error is error
