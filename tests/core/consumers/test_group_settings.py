"""Calls of operators on consumer groups: settings, pauses, deletion."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, rows
from txmq.core import machine
from txmq.core.consumers.commands import (
    AlterGroup,
    DeleteGroup,
    LeaveGroup,
    PauseGroup,
    RequestedSettings,
)
from txmq.core.events.consumers import GroupChanged, GroupPaused
from txmq.core.state.consumer_groups import GroupSettings
from txmq.errors import (
    Conflict,
    GroupMismatch,
    UnknownTopic,
)
from txmq.model.retry import RetryPolicy


@pytest.fixture
def world() -> ConsumersWorld:
    return ConsumersWorld(t=2, u=1)


def test_settings_can_be_changed(world: ConsumersWorld) -> None:
    world.join("a")
    since = len(world.log)
    world.do(AlterGroup("g", RequestedSettings(on_exhausted="block")))
    world.do(AlterGroup("g", RequestedSettings(on_exhausted="block")))
    assert world.events(since) == [
        GroupChanged(1, GroupSettings(on_exhausted="block", altered=("on_exhausted",)), "")
    ]


def test_settings_of_an_operator_override_those_of_members(world: ConsumersWorld) -> None:
    world.join("a", on_exhausted="skip", retry=QUICK)
    assert type(world.join("b", on_exhausted="park", retry=QUICK)) is GroupMismatch
    world.do(AlterGroup("g", RequestedSettings(retry=RetryPolicy((7,))), "me"))
    assert world.join("b", on_exhausted="skip", retry=QUICK).settings.policy == RetryPolicy((7,))
    assert type(world.join("c", on_exhausted="park", retry=QUICK)) is GroupMismatch


def test_a_paused_group_gets_nothing_and_may_still_ack(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    world.publish("t", 2)
    since = len(world.log)
    world.do(PauseGroup("g", paused=True, by="me"))
    assert world.offsets("a") == []
    assert world.ack("a", (0, 1)).messages == 1
    world.do(PauseGroup("g", paused=False))
    assert world.offsets("a") == [1]
    assert [e for e in world.events(since) if isinstance(e, GroupPaused)] == [
        GroupPaused(1, paused=True, by="me", topic_id=0),
        GroupPaused(1, paused=False, by="", topic_id=0),
    ]


def test_settings_and_pauses_of_a_broadcast_group_are_those_of_its_members(
    world: ConsumersWorld,
) -> None:
    world.join("a", group="b", mode="broadcast")
    world.do(AlterGroup("b", RequestedSettings(on_exhausted="skip")))
    world.do(PauseGroup("b", paused=True))
    assert (world.group("b@a").settings.on_exhausted, world.group("b@a").paused) == ("skip", True)
    assert type(world.do(DeleteGroup("b"))) is Conflict
    world.do(LeaveGroup("b@a", "a", "a"))
    world.do(DeleteGroup("b"))
    assert world.state.groups.by_name == {}


def test_a_deleted_group_leaves_nothing_behind(world: ConsumersWorld) -> None:
    empty = rows(ConsumersWorld(t=2, u=1).state)
    world.publish("t", 1, 1, 2)
    world.join("a", mode="ordered")
    world.fetch("a")
    world.nack("a", 0)
    world.nack("a", 2, dead=True)
    assert type(world.do(DeleteGroup("g"))) is Conflict
    machine.save(world.state)
    world.do(LeaveGroup("g", "a", "a"))
    world.do(DeleteGroup("g"))
    machine.save(world.state)
    left = {
        name: len(items)
        for name, items in rows(world.state).items()
        if len(items) > len(empty[name])
    }
    assert left.keys() <= {"topics", "entries", "producers", "groups", "meta"}
    assert left["groups"] == 1, "the numbers, so that an id is never used again"
    assert world.join("a").group_id == 2


def test_a_topic_of_a_group_can_be_paused_alone(world: ConsumersWorld) -> None:
    world.join("a", "t", "u")
    world.publish("t", 1)
    world.publish("u", 1)
    world.do(PauseGroup("g", paused=True, topic="t"))
    assert [message.topic for message in world.fetch("a")] == ["u"]
    machine.save(world.state)
    world.state = machine.load(world.state.tables)
    assert world.offsets("a") == []
    world.do(PauseGroup("g", paused=False, topic="t"))
    assert [message.topic for message in world.fetch("a")] == ["t"]
    assert type(world.do(PauseGroup("g", paused=True, topic="x"))) is UnknownTopic
