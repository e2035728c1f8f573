"""Leases: they run out, are extended or given back, end with their member; and who waits for whom."""

from __future__ import annotations

import pytest

from tests.core.consumer_world import QUICK, Got, World
from tests.core.driver import SECOND
from txmq.broker.core.consumer_commands import (
    ExpireLeases,
    ExtendLeases,
    Leave,
)
from txmq.broker.core.consumer_events import Delivered, LeasesExpired, LeasesExtended, MemberLeft, Returned
from txmq.broker.core.consumer_queries import letters
from txmq.broker.core.leases import ExpireReply, next_due
from txmq.broker.core.state import Rejected
from txmq.errors import BadRequest

LEASE = 60_000_000


@pytest.fixture
def world() -> World:
    return World(t=2)


def test_a_lease_that_runs_out_is_another_attempt(world: World) -> None:
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
    assert world.fetch("a") == [Got("t", 0, 0, 2), Got("t", 0, 2, 2)]
    world.now += LEASE - 1
    assert world.do(ExpireLeases()) == ExpireReply(0, more=False)


def test_leases_run_out_a_bounded_number_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.broker.core.leases.AT_ONCE", 2)
    world.join("a")
    for _ in range(5):
        world.publish("t", 1)
        world.fetch("a")
    world.now += LEASE
    replies = [world.do(ExpireLeases()) for _ in range(3)]
    assert replies == [ExpireReply(2, more=True), ExpireReply(2, more=True), ExpireReply(1, more=False)]


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
    assert world.fetch("b") == [Got("t", 0, 0, 2), Got("t", 0, 1, 2)]


def test_after_a_crash_of_the_broker_everything_unacked_counts_as_delivered_once(world: World) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a", most=2)
    world.ack("a", (0, 1))
    world.boot()
    world.join("a")
    assert world.fetch("a") == [Got("t", 0, 1, 2), Got("t", 0, 2, 1)]


def test_what_may_have_killed_its_consumer_twice_goes_out_alone(world: World) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    for _ in range(2):
        assert len(world.fetch("a")) == 3
        world.now += LEASE
        world.do(ExpireLeases())
    world.publish("t", 4)
    assert world.fetch("a") == [Got("t", 0, 0, 3), Got("t", 0, 3, 1)]
    assert world.fetch("a") == [], "one at a time"
    world.join("b")
    assert world.fetch("b") == [], "its partition is another one"
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Got("t", 0, 1, 3)]
    assert [lease.single for lease in world.group().leases.values()] == [True, True]


def test_in_an_ordered_group_nothing_passes_it(world: World) -> None:
    world.publish("t", 1, 2)
    world.join("a", mode="ordered")
    for _ in range(2):
        world.fetch("a")
        world.now += LEASE
        world.do(ExpireLeases())
    world.publish("t", 3)
    assert world.fetch("a") == [Got("t", 0, 0, 3)]
    assert world.fetch("a") == []
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Got("t", 0, 1, 3), Got("t", 0, 2, 1)]


def test_a_message_that_kills_each_time_is_a_dead_letter(world: World) -> None:
    world.publish("t", 7, 8)
    world.join("a", retry=None)
    deliveries = 0
    while not world.group().letters:
        got = world.fetch("a")
        deliveries += any(message.offset == 0 for message in got)
        world.ack("a", (1, 2))
        world.now += LEASE
        world.do(ExpireLeases())
    assert deliveries == 17, "the first and sixteen retries"
    (event,) = [e for e in world.events() if isinstance(e, Delivered) and e.moves]
    topic_id, partition, offset, row = event.moves[0]
    assert (topic_id, partition, offset) == (1, 0, 0)
    assert row[1] == 17
    assert world.group().positions[1, 0].floor == 2


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


def test_what_takes_its_consumer_and_the_broker_with_it_each_time_is_a_letter_in_the_end() -> None:
    world = World(t=1)
    world.publish("t", 7)
    for attempt in (1, 2, 3):
        world.join(f"m{attempt}", retry=QUICK)
        assert world.fetch(f"m{attempt}") == [Got("t", 0, 0, attempt)]
        world.state = world.replayed()
        world.boot()
    world.join("m4", retry=QUICK)
    assert world.fetch("m4") == []
    found = letters(world.state, "g", 0, 10)
    assert not isinstance(found, Rejected)
    [letter] = found[0]
    assert (letter.fields["attempts"], letter.fields["error_text"]) == (3, "the consumer died or its lease ran out")


def test_what_kills_each_time_after_it_was_postponed_dies_as_well() -> None:
    world = World(t=1)
    world.publish("t", 7)
    world.join("m0", retry=QUICK)
    world.fetch("m0")
    world.nack("m0", 0, postpone=True, delay=0)
    for number in range(4):
        name = f"m{number}"
        world.join(name, retry=QUICK)
        got = world.fetch(name)
        assert bool(got) is (number < 3), number
        world.do(Leave("g", name, name, lost=True))
        world.now += 3 * SECOND
    assert world.group().letters == 1
