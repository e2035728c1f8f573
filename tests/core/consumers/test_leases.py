"""Leases: they expire, are extended or returned, and end with their member."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import ConsumersWorld, Received
from tests.core.due import next_due
from txmq.core.consumers.commands import ExpireLeases, ExtendLeases, LeaveGroup
from txmq.core.consumers.leases import ExpireReply
from txmq.core.events.consumers import LeasesExpired, LeasesExtended, MemberLeft, Returned
from txmq.core.state.positions import Redelivery
from txmq.errors import BadRequest
from txmq.model.topic_partition import TopicPartition

LEASE = 60_000_000


@pytest.fixture
def world() -> ConsumersWorld:
    return ConsumersWorld(t=2)


def test_an_expired_lease_makes_suspects(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a")
    world.ack("a", (1, 2))
    assert next_due(world.state, world.now) == world.now + LEASE
    world.now += LEASE
    since = len(world.log)
    assert world.do(ExpireLeases(world.now)) == ExpireReply(1, more=False)
    assert world.events(since) == [LeasesExpired(1, (1,), ())]
    assert next_due(world.state, world.now) is None
    assert world.ack("a", (0, 1)).messages == 0, "too late"
    assert list(world.group().positions[TopicPartition(1, 0)].redeliver) == [
        (0, 1, Redelivery(1, 1)),
        (2, 3, Redelivery(1, 1)),
    ]
    assert world.fetch("a") == [Received("t", 0, 0, 1), Received("t", 0, 2, 1)]
    world.now += LEASE - 1
    assert world.do(ExpireLeases(world.now)) == ExpireReply(0, more=False)


def test_leases_expire_a_bounded_number_at_a_time(
    world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.core.consumers.leases.EXPIRED_PER_COMMAND", 2)
    world.join("a")
    for _ in range(5):
        world.publish("t", 1)
        world.fetch("a")
    world.now += LEASE
    replies = [world.do(ExpireLeases(world.now)) for _ in range(3)]
    assert replies == [
        ExpireReply(2, more=True),
        ExpireReply(2, more=True),
        ExpireReply(1, more=False),
    ]


def test_a_lease_can_be_extended(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    world.now += LEASE // 2
    since = len(world.log)
    reply = world.do(ExtendLeases("g", "a", 1, (1, 9)))
    assert (reply.extended, reply.over) == ((1,), (9,))
    assert world.events(since) == [LeasesExtended(1, (1,), world.now + LEASE)]
    world.now += LEASE - 1
    assert world.do(ExpireLeases(world.now)).expired == 0
    assert world.do(ExtendLeases("g", "a", 1)).extended == (1,)
    assert type(world.do(ExtendLeases("g", "a", 1, lease_us=1 << 50))) is BadRequest


def test_returned_messages_do_not_count_an_attempt(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a")
    since = len(world.log)
    assert world.return_messages("a", (1, 9)).stale == (("t", 0, 3, 9),)
    assert world.events(since) == [Returned(1, ((1, 0, 1, 3),), ())]
    assert world.fetch("a") == [Received("t", 0, 1, 1), Received("t", 0, 2, 1)]


def test_messages_of_a_lost_member_go_to_others(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2)
    world.join("a")
    world.fetch("a")
    world.join("b")
    since = len(world.log)
    world.do(LeaveGroup("g", "a", "a", lost=True))
    assert world.events(since)[0] == MemberLeft(1, "a", True, ())
    assert world.fetch("b") == [Received("t", 0, 0, 1), Received("t", 0, 1, 1)]


def test_a_member_that_leaves_by_itself_makes_no_suspects(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2)
    world.join("a")
    world.fetch("a")
    world.nack("a", 1, delay=0)
    world.fetch("a")
    world.join("b")
    world.do(LeaveGroup("g", "a", "a"))
    assert world.group().suspect_partitions == set()
    assert world.fetch("b") == [Received("t", 0, 1, 2), Received("t", 0, 0, 1)]


def test_a_crash_of_the_broker_counts_no_attempt(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a", most=2)
    world.ack("a", (0, 1))
    world.boot()
    world.join("a")
    assert world.fetch("a") == [Received("t", 0, 1, 1), Received("t", 0, 2, 1)]


def test_a_partition_that_comes_from_another_member_waits_for_its_messages(
    world: ConsumersWorld,
) -> None:
    world.publish("t", 1, partition=0)
    world.publish("t", 2, partition=1)
    world.join("a", mode="ordered")
    world.fetch("a")
    world.join("b", mode="ordered")
    world.publish("t", 3, partition=1)
    assert list(world.group().members["b"].partitions) == [(1, 1)]
    assert world.fetch("b") == []
    world.ack("a", (0, 1), partition=1)
    assert world.fetch("b") == [Received("t", 1, 1, 1)]


def test_in_a_concurrent_group_a_partition_does_not_wait(world: ConsumersWorld) -> None:
    world.publish("t", 1, partition=1)
    world.join("a")
    world.fetch("a")
    world.join("b")
    world.publish("t", 2, partition=1)
    assert world.fetch("b") == [Received("t", 1, 1, 1)]
