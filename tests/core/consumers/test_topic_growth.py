"""Growth of topics: keys continue in other partitions, after their earlier messages."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, Received, rows
from txmq.core import machine
from txmq.core.consumers.commands import Rebalance, ReplayLetters, ResetPosition
from txmq.core.consumers.group_views import describe_group
from txmq.core.consumers.stall_reasons import StallContext
from txmq.core.steps import run_to_end
from txmq.core.topics.topics import GrowTopic
from txmq.errors import Conflict, RequestRejected

SECOND = 1_000_000


@pytest.fixture
def world() -> ConsumersWorld:
    """A topic whose key 7 is in partition 0 at first, then in partition 2."""
    world = ConsumersWorld(t=2)
    world.join("a", mode="ordered", retry=QUICK)
    world.publish("t", 7, 8)
    return world


def grow(world: ConsumersWorld, partitions: int) -> None:
    world.do(GrowTopic("t", partitions))
    world.do(Rebalance("g"))


def reason(world: ConsumersWorld, partition: int) -> str:
    shown = run_to_end(describe_group(world.state, "g", StallContext(1 << 60, world.now)))
    assert isinstance(shown, dict)
    return str(shown["positions"][partition]["reason"])


def test_new_messages_wait_until_those_from_before_the_growth_are_processed(
    world: ConsumersWorld,
) -> None:
    grow(world, 3)
    world.publish("t", 7, partition=2)
    world.publish("t", 9, partition=0)
    world.publish("t", 6, partition=1)
    assert world.fetch("a") == [Received("t", 0, 0, 1), Received("t", 0, 1, 1)]
    assert reason(world, 2) == "growth"
    world.ack("a", (1, 2))
    assert world.fetch("a") == []
    world.ack("a", (0, 1))
    assert sorted(world.fetch("a")) == [
        Received("t", 0, 2, 1),
        Received("t", 1, 0, 1),
        Received("t", 2, 0, 1),
    ]
    assert reason(world, 2) == "leased"


def test_a_key_that_failed_before_stays_fenced_in_its_new_partition(world: ConsumersWorld) -> None:
    world.fetch("a")
    world.nack("a", 0, dead=True)
    grow(world, 3)
    world.publish("t", 7, 6, partition=2)
    assert world.fetch("a") == []
    world.ack("a", (1, 2))
    assert world.fetch("a") == [Received("t", 2, 1, 1)], "key 7 is parked behind its dead letter"
    world.do(ReplayLetters("g", (("t", 0, 0),)))
    assert world.fetch("a") == [Received("t", 0, 0, 1)]
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Received("t", 2, 0, 1)]
    world.ack("a", (0, 2), partition=2)
    assert world.fetch("a") == []
    assert not world.group().fences


def test_a_retry_from_before_the_growth_delays_only_its_key(world: ConsumersWorld) -> None:
    world.fetch("a")
    world.nack("a", 0)
    world.ack("a", (1, 2))
    grow(world, 3)
    world.publish("t", 7, partition=2)
    world.publish("t", 6, partition=1)
    assert world.fetch("a") == [Received("t", 1, 0, 1)]
    world.now += SECOND
    assert world.fetch("a") == [Received("t", 0, 0, 2)]
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Received("t", 2, 0, 1)]


def test_a_reset_does_not_split_a_key_that_failed_before_the_growth(world: ConsumersWorld) -> None:
    world.fetch("a")
    world.nack("a", 0)
    world.ack("a", (1, 2))
    grow(world, 3)
    world.publish("t", 6, 7, partition=2)
    assert world.fetch("a") == [Received("t", 2, 0, 1)]
    refused = world.do(ResetPosition("g", "t", offsets=((0, 0),)))
    assert isinstance(refused, RequestRejected)
    assert (type(refused), refused.detail) == (Conflict, {"partition": 2, "offset": 1})
    world.do(ResetPosition("g", "t", offsets=((0, 0), (2, 1))))
    world.now += SECOND
    world.join("a", mode="ordered", retry=QUICK)
    assert world.fetch("a") == [Received("t", 0, 0, 1), Received("t", 0, 1, 1)]
    world.ack("a", (0, 2))
    assert Received("t", 2, 1, 1) in world.fetch("a")


def test_a_topic_may_grow_again_while_a_group_is_behind(world: ConsumersWorld) -> None:
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


def test_concurrent_groups_and_new_groups_at_the_end_do_not_wait(world: ConsumersWorld) -> None:
    grow(world, 3)
    world.join("b", group="late", mode="ordered", start="last")
    world.join("b", group="many")
    world.publish("t", 7, partition=2)
    assert world.fetch("b", group="late") == [Received("t", 2, 0, 1)]
    assert Received("t", 2, 0, 1) in world.fetch("b", group="many")


def test_growth_survives_in_the_log_and_in_the_tables(world: ConsumersWorld) -> None:
    grow(world, 3)
    world.publish("t", 7, partition=2)
    machine.save(world.state)
    replayed = world.replayed()
    machine.save(replayed)
    assert rows(replayed) == rows(world.state)
    loaded = machine.load(world.state.tables)
    assert loaded.topics["t"].ends_at_growth == world.state.topics["t"].ends_at_growth == [(2, 0)]
