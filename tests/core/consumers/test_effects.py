"""What an inbox must have, and what is delivered again if it lacks that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core import machine
from txmq.core.consumers.commands import AbandonLetters, DeleteGroup, LeaveGroup, ResetPosition
from txmq.core.consumers.effects import (
    InboxPartition,
    OpenInbox,
    RestoreEffects,
    RestoreReply,
    describe_inbox,
)
from txmq.core.events.topics import FirstsMoved
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.state.positions import MAX_PASSED, EffectsRecord
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.errors import UnknownTopic

HERE = InboxPartition("g", "t", 1, 0)


@pytest.fixture(params=["concurrent", "ordered"])
def world(request: pytest.FixtureRequest) -> ConsumersWorld:
    """A group with an inbox, and ten messages with three keys."""
    world = ConsumersWorld(t=1)
    world.publish("t", 0, 1, 2, 0, 1)
    world.publish("t", 2, 0, 1, 2, 0)
    world.join("a", mode=request.param, retry=QUICK)
    world.do(OpenInbox(HERE, ()))
    return world


def process(world: ConsumersWorld) -> None:
    """Process all that is delivered."""
    while received := world.fetch("a"):
        world.ack("a", *((message.offset, message.offset + 1) for message in received))


def restore(world: ConsumersWorld, *ranges: tuple[int, int], lost: bool = False) -> RestoreReply:
    reply = world.do(RestoreEffects(HERE, ranges, lost))
    assert isinstance(reply, RestoreReply)
    again = world.replayed()
    assert again.groups == world.state.groups
    machine.save(again)
    assert machine.load(again.tables).groups == world.state.groups
    return reply


def shown(world: ConsumersWorld) -> dict[str, Any]:
    described = describe_inbox(world.state, HERE)
    assert isinstance(described, dict)
    return described


def test_what_an_inbox_lacks_is_delivered_again(world: ConsumersWorld) -> None:
    process(world)
    assert restore(world, (2, 4), (7, 8)).restored == 3
    assert world.offsets("a") == [2, 3, 7]
    process(world)
    world.ack("a", (2, 4), (7, 8))
    assert shown(world)["floor"] == 10


def test_nothing_is_restored_that_is_not_settled_or_not_of_the_inbox(
    world: ConsumersWorld,
) -> None:
    world.fetch("a", most=3)
    world.ack("a", (0, 1))
    assert restore(world, (1, 99)).restored == 0
    other = ConsumersWorld(t=1)
    other.publish("t", 1)
    other.join("a")
    process(other)
    assert restore(other, (0, 1)).restored == 0


def test_what_an_operator_skipped_is_not_restored(world: ConsumersWorld) -> None:
    world.fetch("a", most=2)
    world.ack("a", (0, 2))
    world.do(ResetPosition("g", "t", offsets=((0, 6),)))
    process(world)
    assert restore(world, (0, 10)).restored == 6
    assert world.offsets("a") == [0, 1, 6, 7, 8, 9]


def test_a_reset_back_takes_back_what_was_skipped(world: ConsumersWorld) -> None:
    world.do(ResetPosition("g", "t", to="last"))
    world.do(ResetPosition("g", "t", to="first"))
    process(world)
    assert restore(world, (0, 10)).restored == 10


def test_a_reprocess_forgets_nothing_of_what_has_effects_below_it(world: ConsumersWorld) -> None:
    process(world)
    world.do(ResetPosition("g", "t", offsets=((0, 4),), reprocess=True))
    found = shown(world)
    assert (found["base"], found["older"], found["steps"]) == (0, [1, 2], ((4, 2),))
    process(world)
    assert restore(world, (0, 10)).restored == 10


def test_a_reprocess_below_what_an_inbox_was_opened_with_is_compared_from_there(
    world: ConsumersWorld,
) -> None:
    other = ConsumersWorld(t=1)
    other.publish("t", *range(10))
    other.join("a")
    process(other)
    other.do(OpenInbox(HERE, ((5, 10),)))
    other.do(ResetPosition("g", "t", offsets=((0, 2),), reprocess=True))
    process(other)
    assert shown(other)["base"] == 2
    assert restore(other, (0, 10)).restored == 8


def test_the_inbox_of_a_group_made_again_begins_with_its_epoch(world: ConsumersWorld) -> None:
    process(world)
    world.do(ResetPosition("g", "t", offsets=((0, 4),), reprocess=True))
    process(world)
    mode = world.group().settings.mode
    world.do(LeaveGroup("g", "a", "a"))
    world.do(DeleteGroup("g"))
    world.join("a", mode=mode, retry=QUICK)
    world.do(OpenInbox(HERE, ((4, 10),)))
    process(world)
    assert shown(world)["base"] == 4
    assert restore(world, (0, 4)).restored == 0, "older epochs have their effects"


def test_what_retention_passed_is_not_restored_and_what_it_deleted_is_lost(
    world: ConsumersWorld,
) -> None:
    world.fetch("a", most=2)
    world.ack("a", (0, 2))
    world.record(FirstsMoved(1, ((0, 5),), ()))
    process(world)
    assert restore(world, (0, 10)) == RestoreReply(5, ((0, 2),))
    assert restore(world, (0, 10), lost=True).lost == ((0, 2),)
    assert restore(world, (0, 5)) == RestoreReply(0)


def test_failed_messages_have_no_effect_whatever_becomes_of_them(world: ConsumersWorld) -> None:
    """A dead letter comes back only where the order of keys demands it; what an
    operator abandoned and what has expired never do.
    """
    world.fetch("a", most=3)
    for offset in range(3):
        world.nack("a", offset, dead=True)
    world.do(AbandonLetters("g", (("t", 0, 0),), "no", "me"))
    process(world)
    assert restore(world, (0, 3)).restored == 0
    world.now += 1_000_000_000
    world.do(ExpireLetters(1, 1, 1))
    assert world.group().letters == 0
    process(world)
    assert restore(world, (0, 10)).restored == 7


def test_an_ordered_group_gets_all_messages_of_a_key_in_order() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 1, 1, 2, 1)
    world.join("a", mode="ordered", retry=QUICK)
    world.do(OpenInbox(HERE, ()))
    world.fetch("a", most=1)
    world.ack("a", (0, 1))
    world.fetch("a", most=1)
    world.nack("a", 1)
    world.fetch("a")
    generation = world.generation()
    assert restore(world, (0, 1)).restored == 1
    assert world.generation() == generation + 1
    assert world.ack("a", (2, 3)).stale
    received = []
    while more := world.offsets("a"):
        received += more
        world.ack("a", *((offset, offset + 1) for offset in more))
    assert received == [2, 0, 1, 3]


def test_an_inbox_is_opened_with_what_it_has(world: ConsumersWorld) -> None:
    other = ConsumersWorld(t=1)
    other.publish("t", *range(10))
    other.join("a")
    other.fetch("a", most=8)
    other.ack("a", (0, 5), (6, 7))
    other.do(OpenInbox(HERE, ((2, 4),)))
    other.do(OpenInbox(HERE, ()))
    assert shown(other) == {
        "epoch": 1,
        "older": [1],
        "steps": (),
        "end": 10,
        "floor": 5,
        "settled": [(6, 7)],
        "base": 2,
        "passed": [(4, 5), (6, 7)],
    }
    assert restore(other, (0, 10)).restored == 2


def test_another_topic_of_the_name_is_refused(world: ConsumersWorld) -> None:
    world.do(LeaveGroup("g", "a", "a"))
    world.do(DeleteTopic("t"))
    world.do(CreateTopic("t", 1))
    world.join("a", mode=world.group().settings.mode, retry=QUICK)
    refused = world.do(OpenInbox(HERE, ()))
    assert type(refused) is UnknownTopic


def test_what_was_passed_is_bounded() -> None:
    effects = EffectsRecord(0)
    for offset in range(0, 4 * MAX_PASSED, 2):
        effects.pass_over(offset, offset + 1)
    assert len(effects.passed) == MAX_PASSED
    assert effects.base == next(iter(effects.passed)).start - 1
    assert EffectsRecord.from_row(effects.to_row()) == effects
