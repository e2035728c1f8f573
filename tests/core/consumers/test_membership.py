"""Membership: members, generations, assignment, and the beginning of a new group."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core.consumers import membership
from txmq.core.consumers.commands import LeaveGroup, PauseGroup, Rebalance
from txmq.core.consumers.membership import MAX_MEMBERS, JoinBegun
from txmq.core.events.consumers import (
    GroupCreated,
    GroupDeleted,
    MemberJoined,
    MemberLeft,
    PositionsBegun,
    Rebalanced,
    Returned,
)
from txmq.core.state.consumer_groups import GroupSettings
from txmq.core.topics.topics import CreateTopic, DeleteTopic, GrowTopic
from txmq.errors import (
    BadRequest,
    GroupMismatch,
    StaleGeneration,
    Throttled,
    UnknownGroup,
    UnknownMember,
    UnknownTopic,
)
from txmq.model.units import SECOND


@pytest.fixture
def world() -> ConsumersWorld:
    return ConsumersWorld(t=2, u=1)


def test_the_first_member_makes_the_group(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2)
    since = len(world.log)
    reply = world.join("a")
    assert world.events(since) == [
        GroupCreated(1, "g", GroupSettings(), 0, temporary=False, epochs=()),
        MemberJoined(1, "a", "a", (1,), static=False),
        Rebalanced(1, 1, (("a", ((1, 0), (1, 1))),), ((1, 0, 0), (1, 1, 0))),
    ]
    assert reply.assignment == (("t", 0), ("t", 1))
    assert (reply.group, reply.generation, reply.epoch) == ("g", 1, 1)


def test_each_member_that_comes_or_goes_makes_a_generation(world: ConsumersWorld) -> None:
    world.join("a")
    assert world.join("b").assignment == (("t", 1),)
    assert world.generation() == 2
    since = len(world.log)
    world.do(LeaveGroup("g", "a", "a"))
    assert world.events(since) == [
        MemberLeft(1, "a", False, ()),
        Rebalanced(1, 3, (("b", ((1, 0), (1, 1))),), ()),
    ]


def test_joining_again_unchanged_changes_nothing(world: ConsumersWorld) -> None:
    first = world.join("a")
    since = len(world.log)
    assert world.join("a") == first
    assert world.events(since) == []


def test_a_member_may_want_other_topics(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    assert world.join("a", "t", "u").assignment == (("t", 0), ("t", 1), ("u", 0))
    assert world.ack("a", (0, 1)).messages == 1


def test_a_newer_process_of_the_same_name_takes_over(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    old = world.generation()
    world.join("a", instance="newer")
    assert world.offsets("a") == [0]
    assert world.ack("a", (0, 1), generation=old).stale == (("t", 0, 0, 1),)
    assert world.ack("a", (0, 1)).messages == 1
    assert type(world.do(LeaveGroup("g", "a", "a", lost=True))) is UnknownMember


def test_messages_lost_by_a_broken_connection_are_returned(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2, 3, 4)
    world.join("a")
    world.fetch("a")
    since = len(world.log)
    world.join("a", held=(("t", 0, 1, 2), ("t", 0, 3, 9)))
    assert world.events(since) == [Returned(1, ((1, 0, 0, 1), (1, 0, 2, 3)), ())]
    assert [(m.offset, m.attempt) for m in world.fetch("a")] == [(0, 1), (2, 1)]


def test_a_static_member_that_comes_back_moves_nothing(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.publish("t", 2, partition=1)
    world.join("a", static=True)
    world.join("b", static=True)
    world.fetch("a")
    world.fetch("b")
    before = {name: member.partitions for name, member in world.group().members.items()}
    world.join("a", instance="newer", static=True)
    assert {name: member.partitions for name, member in world.group().members.items()} == before
    assert world.ack("b", (0, 1), partition=1).messages == 1
    assert world.offsets("a") == [0]


def test_static_members_outlive_the_broker_and_others_do_not(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2)
    world.join("a", static=True)
    world.join("b")
    world.fetch("a")
    world.boot()
    assert list(world.group().members) == ["a"]
    assert world.group().leases == {}
    assert world.offsets("a") == [0, 1]
    world.do(Rebalance("g"))
    assert list(world.group().members["a"].partitions) == [(1, 0), (1, 1)]
    world.state = world.replayed()
    assert world.group().members["a"].static


@pytest.mark.parametrize("options", [{"named": False}, {"mode": "broadcast"}])
def test_a_static_member_needs_a_name_and_an_assignment(
    world: ConsumersWorld, options: dict[str, Any]
) -> None:
    assert type(world.join("a", static=True, **options)) is BadRequest


@pytest.mark.parametrize(
    ("start", "offsets"), [("first", [0, 1, 2]), ("last", [2]), ("time", [1, 2])]
)
def test_a_new_group_begins_where_it_wants(
    world: ConsumersWorld, start: str, offsets: list[int]
) -> None:
    world.publish("t", 1)
    world.now += SECOND
    world.publish("t", 2)
    world.join("a", start=world.now if start == "time" else start)
    world.publish("t", 3)
    assert world.offsets("a") == offsets


WIDE = ("t", "u", "v", "w")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ConsumersWorld:
    """A world where a join of WIDE takes two steps."""
    monkeypatch.setattr(membership, "STEP_POSITIONS", 3)
    world = ConsumersWorld(t=2, u=2, v=1, w=2)
    for name in WIDE:
        world.publish(name, 1)
    return world


def test_a_join_begins_very_many_partitions_by_steps_of_whole_topics(
    steps: ConsumersWorld,
) -> None:
    assert steps.join("a", *WIDE, start="last") == JoinBegun("g", GroupSettings().session_us)
    assert steps.events(0)[-3:] == [
        GroupCreated(1, "g", GroupSettings(start="last"), 0, temporary=False, epochs=()),
        MemberJoined(1, "a", "a", (), static=False),
        PositionsBegun(1, ((1, 0, 1), (1, 1, 0), (2, 0, 1), (2, 1, 0))),
    ]
    since = len(steps.log)
    reply = steps.join("a", *WIDE, start="last", continued=True)
    [_joined, rebalanced] = steps.events(since)
    assert rebalanced.starts == ((3, 0, 1), (4, 0, 1), (4, 1, 0))
    assert len(reply.assignment) == 7
    assert steps.replayed().groups.by_name["g"] == steps.group()


def test_of_two_that_join_by_steps_under_one_name_the_newer_wins(steps: ConsumersWorld) -> None:
    steps.join("a", *WIDE, instance="older")
    steps.join("a", *WIDE, instance="newer")
    older = steps.join("a", *WIDE, instance="older", continued=True)
    assert (type(older), older.detail) == (UnknownMember, {"replaced": True})
    assert len(steps.join("a", *WIDE, instance="newer", continued=True).assignment) == 7
    assert steps.group().members["a"].instance == "newer"


def test_a_join_that_has_begun_is_not_refused_for_what_others_fill(
    steps: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MAX_POSITIONS", 4)
    steps.join("a", *WIDE)
    assert type(steps.join("b", *WIDE, group="h")) is Throttled
    assert len(steps.join("a", *WIDE, continued=True).assignment) == 7


def test_a_member_that_joins_by_steps_reads_what_it_did_until_the_last_one(
    steps: ConsumersWorld,
) -> None:
    steps.join("a", "v")
    steps.join("a", *WIDE, instance="a")
    steps.join("b", "v", "w")
    assert steps.group().members["a"].topics == (3,)
    assert [tp.topic_id for tp in steps.group().positions] == [3, 1, 1, 2, 2, 4, 4]


def test_a_join_that_does_not_come_to_its_end_leaves_no_temporary_group(
    steps: ConsumersWorld,
) -> None:
    begun = steps.join("a", *WIDE, mode="broadcast", named=False)
    steps.do(LeaveGroup(begun.group, "a", "a", lost=True))
    assert list(steps.state.groups.by_name) == ["g"]
    refused = steps.join("a", *WIDE, mode="broadcast", named=False, continued=True)
    assert type(refused) is UnknownGroup
    assert list(steps.state.groups.by_name) == ["g"]


def test_partitions_that_a_topic_has_grown_are_read_from_their_beginning(
    world: ConsumersWorld,
) -> None:
    world.join("a", start="last")
    world.do(GrowTopic("t", 3))
    world.publish("t", 1, partition=2)
    since = len(world.log)
    world.do(Rebalance("g"))
    assert world.events(since) == [
        Rebalanced(1, 2, (("a", ((1, 0), (1, 1), (1, 2))),), ((1, 2, 0),))
    ]
    assert world.offsets("a") == [0]
    world.do(Rebalance("g"))
    assert world.generation() == 2


def test_a_deleted_topic_is_no_longer_assigned(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a", "t", "u")
    world.do(DeleteTopic("t"))
    assert world.offsets("a") == []
    world.do(Rebalance("g"))
    assert list(world.group().members["a"].partitions) == [(2, 0)]


def test_members_beyond_the_partitions_share_them_in_a_concurrent_group_only(
    world: ConsumersWorld,
) -> None:
    for name in "abc":
        world.join(name)
        world.join(name, group="o", mode="ordered")
    assert [len(m.partitions) for m in world.group("g").members.values()] == [1, 1, 1]
    assert sorted(len(m.partitions) for m in world.group("o").members.values()) == [0, 1, 1]


def test_settings_must_be_those_of_the_group(world: ConsumersWorld) -> None:
    world.join("a", on_exhausted="skip", retry=QUICK, lease_us=5_000_000)
    assert world.join("b").settings == world.group().settings
    assert world.join("c", retry=QUICK, start="last").generation == 3
    assert type(world.join("d", mode="ordered")) is GroupMismatch
    assert type(world.join("d", on_exhausted="park")) is GroupMismatch
    assert type(world.join("d", lease_us=6_000_000)) is GroupMismatch


@pytest.mark.parametrize(
    "wanted",
    [
        {"mode": "loud"},
        {"on_exhausted": "explode"},
        {"lease_us": 0},
        {"lease_us": 1 << 50},
        {"session_us": 10},
        {"start": "middle"},
        {"strategy": "chance"},
    ],
)
def test_settings_out_of_range_are_refused(world: ConsumersWorld, wanted: dict[str, Any]) -> None:
    assert type(world.join("a", **wanted)) is BadRequest
    assert world.state.groups.by_name == {}


def test_unknown_groups_members_and_topics_are_refused(world: ConsumersWorld) -> None:
    assert type(world.join("a", "nothing")) is UnknownTopic
    assert type(world.do(LeaveGroup("g", "a", "a"))) is UnknownGroup
    assert type(world.do(PauseGroup("g", paused=True))) is UnknownGroup
    assert type(world.join("a@b")) is BadRequest
    world.join("a")
    assert type(world.do(LeaveGroup("g", "b", "b"))) is UnknownMember
    assert type(world.fetch("b")) is UnknownMember
    assert type(world.ack("b", (0, 1))) is UnknownMember


def test_a_member_with_an_old_generation_gets_nothing(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a")
    world.join("b")
    refused = world.fetch("a", generation=1)
    assert (type(refused), refused.detail) == (StaleGeneration, {"generation": 2})


def test_the_number_of_members_is_limited(world: ConsumersWorld) -> None:
    world.join("x")
    members = world.group().members
    members |= {f"x{number}": members["x"] for number in range(MAX_MEMBERS - 1)}
    assert type(world.join("one more")) is Throttled


def test_the_number_of_broadcast_members_is_limited(
    world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.core.consumers.membership.MAX_MEMBERS", 2)
    for name in "ab":
        world.join(name, group="b", mode="broadcast")
        world.do(LeaveGroup(f"b@{name}", name, name))
    assert type(world.join("c", group="b", mode="broadcast")) is Throttled
    assert world.join("a", group="b", mode="broadcast").generation == 3
    monkeypatch.setattr("txmq.core.consumers.membership.MAX_GROUPS", 3)
    assert type(world.join("a", group="other")) is Throttled


def test_each_broadcast_member_gets_everything_and_keeps_its_place(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    assert world.join("a", group="b", mode="broadcast").group == "b@a"
    world.join("c", group="b", mode="broadcast")
    assert world.offsets("a", group="b@a") == world.offsets("c", group="b@c") == [0]
    world.ack("a", (0, 1), group="b@a")
    world.do(LeaveGroup("b@a", "a", "a"))
    world.publish("t", 2)
    world.join("a", group="b", mode="broadcast")
    assert world.offsets("a", group="b@a") == [1]
    assert type(world.join("x", group="b")) is GroupMismatch


def test_a_nameless_broadcast_member_begins_where_it_asks_to(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("m-1", group="b", mode="broadcast", named=False, start="first")
    assert world.offsets("m-1", group="b@m-1") == [0]


def test_a_nameless_broadcast_member_begins_at_the_end_and_leaves_nothing(
    world: ConsumersWorld,
) -> None:
    world.publish("t", 1)
    world.join("m-1", group="b", mode="broadcast", named=False)
    world.publish("t", 2)
    assert world.offsets("m-1", group="b@m-1") == [1]
    since = len(world.log)
    world.do(LeaveGroup("b@m-1", "m-1", "m-1", lost=True))
    assert world.events(since) == [
        MemberLeft(2, "m-1", True, ()),
        GroupDeleted(2, "its member left"),
    ]
    assert list(world.state.groups.by_name) == ["b"]
    world.join("m-2", group="b", mode="broadcast", named=False)
    world.boot()
    assert list(world.state.groups.by_name) == ["b"]


def test_members_go_on_with_a_topic_that_is_made_again_from_its_first_message(
    world: ConsumersWorld,
) -> None:
    world.publish("t", 0, 3)
    world.join("a", start="last")
    world.do(DeleteTopic("t"))
    world.do(Rebalance("g"))
    assert world.group().members["a"].partitions == {}
    world.do(CreateTopic("t", 1))
    world.publish("t", 0, 2)
    since = len(world.log)
    world.do(Rebalance("g"))
    topic_id = world.state.topics["t"].topic_id
    assert world.events(since) == [
        MemberJoined(1, "a", "a", (topic_id,), static=False),
        Rebalanced(1, 3, (("a", ((topic_id, 0),)),), ((topic_id, 0, 0),)),
    ]
    world.do(Rebalance("g"))
    assert world.generation() == 3
