"""Leases: they run out, are extended or given back, end with their member; and who
waits for whom.
"""

from __future__ import annotations

import pytest

from tests.core.consumer_world import Got, World
from tests.core.due import next_due
from txmq.core.consumers.commands import ExpireLeases, ExtendLeases, Leave
from txmq.core.consumers.leases import ExpireReply
from txmq.core.events.consumers import LeasesExpired, LeasesExtended, MemberLeft, Returned
from txmq.core.state.positions import Back
from txmq.errors import BadRequest

LEASE = 60_000_000


@pytest.fixture
def world() -> World:
    return World(t=2)


def test_a_lease_that_runs_out_makes_suspects(world: World) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a")
    world.ack("a", (1, 2))
    assert next_due(world.state, world.now) == world.now + LEASE
    world.now += LEASE
    since = len(world.log)
    assert world.do(ExpireLeases()) == ExpireReply(1, more=False)
    assert world.events(since) == [LeasesExpired(1, (1,), ())]
    assert next_due(world.state, world.now) is None
    assert world.ack("a", (0, 1)).messages == 0, "too late"
    assert list(world.group().positions[1, 0].redeliver) == [(0, 1, Back(1, 1)), (2, 3, Back(1, 1))]
    assert world.fetch("a") == [Got("t", 0, 0, 1), Got("t", 0, 2, 1)]
    world.now += LEASE - 1
    assert world.do(ExpireLeases()) == ExpireReply(0, more=False)


def test_leases_run_out_a_bounded_number_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.core.consumers.leases.AT_ONCE", 2)
    world.join("a")
    for _ in range(5):
        world.publish("t", 1)
        world.fetch("a")
    world.now += LEASE
    replies = [world.do(ExpireLeases()) for _ in range(3)]
    assert replies == [
        ExpireReply(2, more=True),
        ExpireReply(2, more=True),
        ExpireReply(1, more=False),
    ]


def test_a_lease_can_be_extended(world: World) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    world.now += LEASE // 2
    since = len(world.log)
    reply = world.do(ExtendLeases("g", "a", 1, (1, 9)))
    assert (reply.extended, reply.over) == ((1,), (9,))
    assert world.events(since) == [LeasesExtended(1, (1,), world.now + LEASE)]
    world.now += LEASE - 1
    assert world.do(ExpireLeases()).expired == 0
    assert world.do(ExtendLeases("g", "a", 1)).extended == (1,)
    assert world.do(ExtendLeases("g", "a", 1, lease_us=1 << 50)).error is BadRequest


def test_messages_given_back_have_not_been_tried(world: World) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a")
    since = len(world.log)
    assert world.give_back("a", (1, 9)).stale == (("t", 0, 3, 9),)
    assert world.events(since) == [Returned(1, ((1, 0, 1, 3),), ())]
    assert world.fetch("a") == [Got("t", 0, 1, 1), Got("t", 0, 2, 1)]


def test_a_member_that_goes_leaves_its_messages_to_others(world: World) -> None:
    world.publish("t", 1, 2)
    world.join("a")
    world.fetch("a")
    world.join("b")
    since = len(world.log)
    world.do(Leave("g", "a", "a", lost=True))
    assert world.events(since)[0] == MemberLeft(1, "a", True, ())
    assert world.fetch("b") == [Got("t", 0, 0, 1), Got("t", 0, 1, 1)]


def test_a_member_that_leaves_by_itself_makes_no_suspects(world: World) -> None:
    world.publish("t", 1, 2)
    world.join("a")
    world.fetch("a")
    world.nack("a", 1, delay=0)
    world.fetch("a")
    world.join("b")
    world.do(Leave("g", "a", "a"))
    assert world.group().suspects == set()
    assert world.fetch("b") == [Got("t", 0, 1, 2), Got("t", 0, 0, 1)]


def test_after_a_crash_of_the_broker_nothing_has_been_tried(world: World) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a", most=2)
    world.ack("a", (0, 1))
    world.boot()
    world.join("a")
    assert world.fetch("a") == [Got("t", 0, 1, 1), Got("t", 0, 2, 1)]


def test_a_partition_that_comes_from_another_member_waits_for_its_messages(world: World) -> None:
    world.publish("t", 1, partition=0)
    world.publish("t", 2, partition=1)
    world.join("a", mode="ordered")
    world.fetch("a")
    world.join("b", mode="ordered")
    world.publish("t", 3, partition=1)
    assert list(world.group().members["b"].partitions) == [(1, 1)]
    assert world.fetch("b") == []
    world.ack("a", (0, 1), partition=1)
    assert world.fetch("b") == [Got("t", 1, 1, 1)]


def test_in_a_concurrent_group_it_does_not(world: World) -> None:
    world.publish("t", 1, partition=1)
    world.join("a")
    world.fetch("a")
    world.join("b")
    world.publish("t", 2, partition=1)
    assert world.fetch("b") == [Got("t", 1, 1, 1)]
