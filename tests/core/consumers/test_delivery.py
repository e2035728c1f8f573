"""Deliveries and acks: which messages are delivered, in which order, and their fate."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import BATCH, QUICK, ConsumersWorld, Received
from txmq.core.consumers import fetch_choice
from txmq.core.consumers.candidates import CandidateSource
from txmq.core.consumers.commands import (
    AckMessages,
    CandidateRead,
    Deliver,
    ExpireLeases,
    LeaveGroup,
    PauseGroup,
    TopicRange,
)
from txmq.core.events.consumers import Acked, Delivered
from txmq.core.topics.topics import CreateTopic
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import SECOND

LEASE = 60_000_000


@pytest.fixture
def world() -> ConsumersWorld:
    return ConsumersWorld(t=2)


def test_neighbouring_batches_are_delivered_under_one_lease(world: ConsumersWorld) -> None:
    for _ in range(5):
        world.publish("t", 1)
    world.publish("t", 1, 2, 3, partition=1)
    world.join("a")
    since = len(world.log)
    assert world.fetch("a") == [
        *(Received("t", 1, n, 1) for n in range(3)),
        *(Received("t", 0, n, 1) for n in range(5)),
    ]
    ranges = ((1, 1, 0, 3, 1), (1, 0, 0, 5, 1))
    assert world.events(since) == [
        Delivered(1, 1, "a", world.now + LEASE, False, ranges, (), (), (), (), (), (), (), 0)
    ]


def test_neighbouring_batches_are_joined_to_runs(world: ConsumersWorld) -> None:
    for keys in ((1,), (2,), (3, 4), (5,), (6, 7, 8, 9)):
        world.publish("t", *keys)
    world.publish("t", 1, partition=1)
    world.join("a")
    shapes = [
        (c.partition, c.base_offset, c.first_row, c.rows)
        for c in world.choose("a", run=4).candidates
    ]
    assert shapes == [(1, 0, 0, 1), (0, 0, 0, 4), (0, 4, 0, 1), (0, 5, 0, 4)]
    assert [len(c.batches) for c in world.choose("a", run=4).candidates] == [1, 3, 1, 1]
    assert [(c.partition, c.rows) for c in world.choose("a", run=100, most=8).candidates] == [
        (1, 1),
        (0, 7),
    ]
    (pick,) = world.read_candidates(world.choose("a", run=100, most=8).candidates[1:])
    assert world.do(Deliver("g", "a", 1, (pick,))).deliveries == ((0, 0, 7, 1, False),)
    assert [
        (c.partition, c.base_offset, c.first_row, c.rows)
        for c in world.choose("a", run=100).candidates
    ] == [
        (0, 5, 2, 2),
        (1, 0, 0, 1),
    ]


def test_a_fetch_stops_at_its_limits(world: ConsumersWorld) -> None:
    for _ in range(4):
        world.publish("t", 1, 2, 3)
    world.join("a")
    assert [c.rows for c in world.choose("a", most=7).candidates] == [3, 3, 1]
    assert [c.rows for c in world.choose("a", size=2 * BATCH).candidates] == [3, 3]
    assert [c.rows for c in world.choose("a", size=1).candidates] == [3], "one always goes"
    assert world.offsets("a", most=7) == list(range(7))
    first = world.choose("a", most=3).candidates
    assert [(c.base_offset, c.first_row, c.rows) for c in first] == [(6, 1, 2), (9, 0, 1)]


def test_retries_of_one_large_batch_count_as_one_batch_of_a_fetch(
    world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        world.publish("t", *range(4))
    world.join("a", retry=QUICK)
    for offset in world.offsets("a"):
        if offset == 1:
            world.ack("a", (1, 2))
        else:
            world.nack("a", offset)
    world.now += 10 * SECOND

    def planned(size: int) -> list[tuple[int, int]]:
        return [(c.start, c.rows) for c in world.choose("a", size=size).candidates]

    assert planned(BATCH) == [(0, 1)], "each piece goes out with its whole batch"
    monkeypatch.setattr(fetch_choice, "SINGLE_ROW_BYTES", BATCH - 1)
    assert planned(BATCH) == [(0, 1), (2, 2)]
    assert planned(2 * BATCH) == [(0, 1), (2, 2), (4, 4)]
    monkeypatch.setattr(fetch_choice, "MAX_ROWS", 3)
    assert planned(2 * BATCH) == [(0, 1), (2, 2)]


def test_messages_are_delivered_once_they_are_durable(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    durable = world.end
    world.publish("t", 2)
    world.join("a")
    assert [c.start for c in world.choose("a", durable=durable).candidates] == [0]
    assert not world.choose("a", durable=durable - 1).candidates


def test_a_first_delivery_need_not_wait_for_the_disk_a_later_one_must(
    world: ConsumersWorld,
) -> None:
    world.publish("t", 1)
    world.join("a")
    assert world.early("a")
    world.fetch("a")
    world.now += LEASE
    world.do(ExpireLeases(world.now))
    assert not world.early("a")


def test_a_delivery_checks_its_plan_again(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2)
    world.join("a")
    found = world.choose("a")
    assert world.deliver("a", 1, found) == [Received("t", 0, 0, 1), Received("t", 0, 1, 1)]
    assert world.deliver("a", 1, found) == [], "somebody else was quicker"
    world.publish("t", 3)
    found = world.choose("a")
    world.do(PauseGroup("g", paused=True))
    assert world.deliver("a", 1, found) == []


def test_a_candidate_behind_a_gap_is_left_out(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.publish("t", 2)
    world.join("a")
    _first, second = world.read_candidates(world.choose("a").candidates)
    assert world.do(Deliver("g", "a", 1, (second,))).deliveries == ()


def test_acks_come_in_any_order_and_the_floor_follows(world: ConsumersWorld) -> None:
    world.publish("t", *range(6))
    world.join("a")
    world.fetch("a")
    since = len(world.log)
    assert world.ack("a", (2, 3), (4, 5), (3, 4)).messages == 3
    world.ack("a", (0, 2))
    assert world.events(since) == [
        Acked(1, ((1, 0, 2, 5),), (), (), ()),
        Acked(1, ((1, 0, 0, 2),), (), (), ()),
    ]
    assert world.group().positions[TopicPartition(1, 0)].floor == 5
    world.ack("a", (5, 6))
    assert world.group().leases == {}


@pytest.mark.parametrize(
    ("ranges", "stale"),
    [
        (("t", 0, 0, 9), ("t", 0, 2, 9)),
        (("t", 0, 7, 1 << 62), ("t", 0, 7, 1 << 62)),
        (("t", 1, 0, 1), ("t", 1, 0, 1)),
        (("t", 9, 0, 1), ("t", 9, 0, 1)),
        (("nothing", 0, 0, 1), ("nothing", 0, 0, 1)),
    ],
)
def test_messages_that_are_not_leased_cannot_be_acked(
    world: ConsumersWorld, ranges: TopicRange, stale: TopicRange
) -> None:
    world.publish("t", 1, 2)
    world.join("a")
    world.fetch("a")
    assert world.do(AckMessages("g", "a", 1, (ranges,))).stale == (stale,)


def test_a_stale_ack_is_refused_unless_the_message_is_settled(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2, 3, 4)
    world.join("a", mode="ordered")
    world.fetch("a")
    world.ack("a", (0, 1))
    world.nack("a", 2)
    late = world.ack("a", (0, 9))
    assert (late.messages, late.stale) == (2, (("t", 0, 0, 1), ("t", 0, 2, 3), ("t", 0, 4, 9)))
    assert set(late.refused) == {("t", 0, 2, 3), ("t", 0, 4, 9)}, (
        "it failed, and those are still to come"
    )
    assert world.do(AckMessages("g", "a", 1, (("nothing", 0, 0, 1),))).refused == (
        ("nothing", 0, 0, 1),
    )


def test_an_ack_counts_once(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    assert world.ack("a", (0, 1), (0, 1)).messages == 1
    since = len(world.log)
    again = world.ack("a", (0, 1))
    assert (again.stale, again.refused) == ((("t", 0, 0, 1),), ()), (
        "not leased any more, but done with"
    )
    assert world.events(since) == []


def test_a_member_cannot_ack_for_another_member(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    world.join("b")
    assert world.ack("b", (0, 1)).messages == 0
    assert world.ack("a", (0, 1), generation=1).messages == 1, (
        "what one has one may finish after a rebalance"
    )


def test_a_future_generation_has_no_claims(world: ConsumersWorld) -> None:
    world.publish("t", 1)
    world.join("a")
    world.fetch("a")
    assert world.ack("a", (0, 1), generation=7).messages == 0


def test_members_that_share_a_partition_get_different_messages(world: ConsumersWorld) -> None:
    world.do(CreateTopic("one", 1))
    world.publish("one", *range(4))
    for name in "ab":
        world.join(name, "one")
    assert world.offsets("a", most=3) == [0, 1, 2]
    assert world.offsets("b") == [3]
    world.do(LeaveGroup("g", "a", "a"))
    assert world.offsets("b") == [0, 1, 2]


def test_no_partition_is_always_last(world: ConsumersWorld) -> None:
    for partition in (0, 1):
        world.publish("t", *range(10), partition=partition)
    world.join("a")
    firsts = {world.fetch("a", most=1)[0].partition for _ in range(4)}
    assert firsts == {0, 1}


def test_a_candidate_names_its_batch(world: ConsumersWorld) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    world.fetch("a", most=1)
    (candidate,) = world.choose("a").candidates
    assert (candidate.source, candidate.base_offset, candidate.first_row, candidate.rows) == (
        CandidateSource.LIVE,
        0,
        1,
        2,
    )
    assert (candidate.batch.length, candidate.batch.stored_at, candidate.attempt) == (
        BATCH,
        world.now,
        1,
    )
    assert not candidate.needs_keys
    reply = world.do(Deliver("g", "a", 1, (CandidateRead(candidate),)))
    assert reply.deliveries == ((0, 1, 3, 1, False),)


def test_messages_of_topics_that_a_member_excludes_are_not_planned() -> None:
    world = ConsumersWorld(t=1, u=1)
    for topic in ("t", "u"):
        world.publish(topic, 1, 2, 3)
    world.join("a", "t", "u", retry=QUICK)
    assert len(world.fetch("a")) == 6
    world.nack("a", 0)
    world.return_messages("a", (1, 2))
    world.now += 60 * SECOND
    for topic in ("t", "u"):
        world.publish(topic, 4)

    def planned(*without: str) -> set[int]:
        return {candidate.topic_id for candidate in world.choose("a", without=without).candidates}

    sources = {candidate.source for candidate in world.choose("a", without=("u",)).candidates}
    assert sources == {CandidateSource.LIVE, CandidateSource.REDELIVER, CandidateSource.FAILED}
    assert planned() == {1, 2}
    assert planned("t") == {2}
    assert planned("u") == {1}
    assert planned("t", "u") == set()
