"""Resets: a group continues from other offsets of a topic."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core import machine
from txmq.core.consumers.commands import (
    CloneGroup,
    DeleteGroup,
    Deliver,
    LeaveGroup,
    ResetPosition,
)
from txmq.core.consumers.resets import ResetPartition
from txmq.core.events.consumers import PositionReset
from txmq.core.state.restores import epoch_of
from txmq.core.topics.topics import GrowTopic
from txmq.errors import (
    BadRequest,
    OffsetOutOfRange,
    StaleGeneration,
    UnknownGroup,
    UnknownTopic,
)
from txmq.model.topic_partition import TopicPartition


@pytest.fixture
def world() -> ConsumersWorld:
    return ConsumersWorld(t=2, u=1)


def test_a_group_continues_from_the_requested_offsets(world: ConsumersWorld) -> None:
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
    assert world.events(since) == [PositionReset(1, 1, ((0, 1),), 2, "me", 2)]
    assert [(m.offset, m.attempt) for m in world.fetch("a")] == [(1, 1), (2, 1)]
    assert world.join("a").epoch == 2


@pytest.mark.parametrize(("to", "offsets"), [("last", ()), ("", ((0, 1), (1, 0), (2, 3)))])
def test_a_reset_without_members_moves_partitions_that_grew_since(
    world: ConsumersWorld, to: str, offsets: tuple[tuple[int, int], ...]
) -> None:
    world.publish("t", 1)
    world.join("a")
    world.do(LeaveGroup("g", "a", "a"))
    world.do(GrowTopic("t", 3))
    world.publish("t", 1, 2, 3, partition=2)
    command = ResetPosition("g", "t", to=to, offsets=offsets)
    assert world.do(command._replace(dry_run=True)).positions[2] == (2, 0, 3, 0, 3, 0)
    world.do(command)
    world.state = world.replayed()
    world.publish("t", 4, partition=2)
    world.join("a")
    assert [(m.partition, m.offset) for m in world.fetch("a")] == [(2, 3)]


def test_a_reset_makes_leases_stale(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a")
    world.do(ResetPosition("g", "t", to="last"))
    assert world.ack("a", (0, 3)).stale == (("t", 0, 0, 3),)
    assert world.offsets("a") == []
    assert world.group().leases == {}


def test_a_reset_restores_failed_messages(world: ConsumersWorld) -> None:
    world.publish("t", 1, 1, 2, 2)
    world.join("a", mode="ordered")
    world.fetch("a", most=1)
    world.nack("a", 0)
    world.fetch("a", most=2)
    world.nack("a", 2, dead=True)
    world.fetch("a")
    assert [fence.parked for _topic, _key, fence in world.group().all_fences()] == [1, 1]
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
def test_a_reset_to_an_impossible_offset_is_refused(
    world: ConsumersWorld, command: ResetPosition, error: type[Exception]
) -> None:
    world.join("a")
    refused = world.do(command)
    assert type(refused) is error


def test_a_preview_counts_repeated_skipped_and_restored_messages(world: ConsumersWorld) -> None:
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
        0: ResetPartition(0, 2, 0, again=3, skipped=0, back=1),
        3: ResetPartition(0, 2, 3, again=1, skipped=1, back=1),
        5: ResetPartition(0, 2, 5, again=0, skipped=1, back=0),
        8: ResetPartition(0, 2, 8, again=0, skipped=4, back=0),
    }


def reset_twice(world: ConsumersWorld) -> None:
    """Process partition 0 again, then move partition 1."""
    world.do(ResetPosition("g", "t", offsets=((0, 0),), reprocess=True))
    world.do(ResetPosition("g", "t", offsets=((1, 0),)))


def test_a_reset_begins_a_generation_and_only_what_it_names_is_processed_again(
    world: ConsumersWorld,
) -> None:
    world.join("a")
    reset_twice(world)
    joined = world.join("a")
    assert (joined.generation, joined.epoch) == (3, 2)
    assert joined.identities == ({"t": 1}, (("t", 0, 2, ((0, 2),)), ("t", 1, 3, ())))
    world.state = world.replayed()
    machine.save(world.state)
    world.state = machine.load(world.state.tables)
    assert world.join("a").identities == joined.identities


def test_a_member_that_does_not_know_of_a_reset_gets_nothing(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2)
    world.join("a")
    world.do(ResetPosition("g", "t", to="first", reprocess=True))
    refused = world.do(Deliver("g", "a", 1, ()))
    assert type(refused) is StaleGeneration


def test_a_reset_returns_a_retry_below_it_that_is_leased(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2)
    world.join("a", retry=QUICK)
    world.fetch("a")
    world.nack("a", 0)
    world.now += 10_000_000
    assert world.offsets("a") == [0]
    world.do(ResetPosition("g", "t", to="last"))
    assert world.ack("a", (0, 1)).stale == (("t", 0, 0, 1),)
    assert world.offsets("a") == [0]


def test_messages_below_a_reprocess_keep_their_epoch(world: ConsumersWorld) -> None:
    """A later reset may deliver them again, to inboxes that have their effects."""
    world.publish("t", *range(9))
    world.join("a")
    for offset in (4, 6, 2):
        world.do(ResetPosition("g", "t", offsets=((0, offset),), reprocess=True))
    world.do(ResetPosition("g", "t", to="first"))
    assert world.join("a").identities.resets[0] == ("t", 0, 5, ((2, 4),))
    world.do(ResetPosition("g", "t", offsets=((0, 6),), reprocess=True))
    assert world.group().epochs[TopicPartition(1, 0)] == ((2, 4), (6, 5))
    world.state = world.replayed()
    machine.save(world.state)
    assert machine.load(world.state.tables).groups == world.state.groups


def test_epochs_of_a_group_outlive_it(world: ConsumersWorld) -> None:
    """The next group of its name goes on with them, as do its clones of that name."""
    world.join("a")
    reset_twice(world)
    world.join("a")
    for _ in range(2):
        world.do(LeaveGroup("g", "a", "a"))
        world.do(DeleteGroup("g"))
        world.state = world.replayed()
        machine.save(world.state)
        world.state = machine.load(world.state.tables)
        joined = world.join("a")
        assert joined.epoch == 2
        assert joined.identities.resets == (("t", 0, 0, ((0, 2),)),)
    world.do(LeaveGroup("g", "a", "a"))
    world.do(DeleteGroup("g"))
    world.join("b", group="other")
    world.do(CloneGroup("other", "g"))
    assert epoch_of(world.state, world.group(), TopicPartition(1, 0)) == 2
