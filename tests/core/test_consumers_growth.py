"""A topic grows: keys go on in other partitions, and never before what was sent of them
before.
"""

from __future__ import annotations

import pytest

from tests.core.consumer_world import QUICK, Got, World, rows
from txmq.core import machine
from txmq.core.consumers.commands import Rebalance, ReplayLetters
from txmq.core.consumers.queries import show
from txmq.core.consumers.stall_reasons import Seen
from txmq.core.topics.topics import GrowTopic

SECOND = 1_000_000


@pytest.fixture
def world() -> World:
    """Key 7 is in partition 0 at first, then in partition 2."""
    world = World(t=2)
    world.join("a", mode="ordered", retry=QUICK)
    world.publish("t", 7, 8)
    return world


def grow(world: World, partitions: int) -> None:
    world.do(GrowTopic("t", partitions))
    world.do(Rebalance("g"))


def reason(world: World, partition: int) -> str:
    shown = show(world.state, "g", Seen(1 << 60, world.now))
    assert isinstance(shown, dict)
    return str(shown["positions"][partition]["reason"])


def test_nothing_new_is_delivered_before_what_was_there_is_done_with(world: World) -> None:
    grow(world, 3)
    world.publish("t", 7, partition=2)
    world.publish("t", 9, partition=0)
    world.publish("t", 6, partition=1)
    assert world.fetch("a") == [Got("t", 0, 0, 1), Got("t", 0, 1, 1)]
    assert reason(world, 2) == "growth"
    world.ack("a", (1, 2))
    assert world.fetch("a") == []
    world.ack("a", (0, 1))
    assert sorted(world.fetch("a")) == [Got("t", 0, 2, 1), Got("t", 1, 0, 1), Got("t", 2, 0, 1)]
    assert reason(world, 2) == "leased"


def test_a_key_that_failed_before_stays_fenced_wherever_it_goes_on(world: World) -> None:
    world.fetch("a")
    world.nack("a", 0, dead=True)
    grow(world, 3)
    world.publish("t", 7, 6, partition=2)
    assert world.fetch("a") == []
    world.ack("a", (1, 2))
    assert world.fetch("a") == [Got("t", 2, 1, 1)], "key 7 is parked behind its dead letter"
    world.do(ReplayLetters("g", (("t", 0, 0),)))
    assert world.fetch("a") == [Got("t", 0, 0, 1)]
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Got("t", 2, 0, 1)]
    world.ack("a", (0, 2), partition=2)
    assert world.fetch("a") == []
    assert not world.group().fences


def test_what_a_retry_is_of_before_the_growth_is_no_obstacle_but_for_its_key(world: World) -> None:
    world.fetch("a")
    world.nack("a", 0)
    world.ack("a", (1, 2))
    grow(world, 3)
    world.publish("t", 7, partition=2)
    world.publish("t", 6, partition=1)
    assert world.fetch("a") == [Got("t", 1, 0, 1)]
    world.now += SECOND
    assert world.fetch("a") == [Got("t", 0, 0, 2)]
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Got("t", 2, 0, 1)]


def test_a_topic_may_grow_again_while_a_group_is_behind(world: World) -> None:
    grow(world, 3)
    world.publish("t", 7, partition=2)
    grow(world, 4)
    world.publish("t", 7, partition=3)
    seen = []
    while got := world.fetch("a"):
        seen.append([(message.partition, message.offset) for message in got])
        for message in got:
            world.ack("a", (message.offset, message.offset + 1), partition=message.partition)
    assert seen == [[(0, 0), (0, 1)], [(2, 0)], [(3, 0)]]


def test_concurrent_groups_and_new_ones_at_the_end_wait_for_nobody(world: World) -> None:
    grow(world, 3)
    world.join("b", group="late", mode="ordered", start="last")
    world.join("b", group="many")
    world.publish("t", 7, partition=2)
    assert world.fetch("b", group="late") == [Got("t", 2, 0, 1)]
    assert Got("t", 2, 0, 1) in world.fetch("b", group="many")


def test_growth_is_remembered_by_the_log_and_by_the_tables(world: World) -> None:
    grow(world, 3)
    world.publish("t", 7, partition=2)
    machine.save(world.state)
    replayed = world.replayed()
    machine.save(replayed)
    assert rows(replayed) == rows(world.state)
    loaded = machine.load(world.state.tables)
    assert loaded.topics["t"].growths == world.state.topics["t"].growths == [(2, 0)]
