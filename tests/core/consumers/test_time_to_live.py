"""Messages whose time to live is over are settled and counted, never delivered, and
block nothing.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, rows
from txmq.core import machine
from txmq.core.consumers.candidates import Candidate
from txmq.core.consumers.commands import CandidateRead, Deliver
from txmq.model.topic_partition import TopicPartition


class ExpiringWorld(ConsumersWorld):
    """A world in which messages expire: `over` are their (partition, offset)."""

    def __init__(self, **topics: int) -> None:
        super().__init__(**topics)
        self.over: set[tuple[int, int]] = set()

    def read_candidates(self, candidates: tuple[Candidate, ...]) -> tuple[CandidateRead, ...]:
        return tuple(
            pick._replace(
                expired=frozenset(
                    o for o in range(c.start, c.start + c.rows) if (c.partition, o) in self.over
                )
            )
            for pick, c in zip(super().read_candidates(candidates), candidates, strict=True)
        )

    def expire(self, *offsets: int, partition: int = 0) -> None:
        self.over.update((partition, offset) for offset in offsets)

    @property
    def floor(self) -> int:
        return self.group().positions[TopicPartition(self.state.topics["t"].topic_id, 0)].floor


@pytest.fixture
def world() -> ExpiringWorld:
    return ExpiringWorld(t=2)


def test_the_rest_of_a_batch_is_delivered_and_the_floor_passes_expired_messages(
    world: ExpiringWorld,
) -> None:
    world.publish("t", 1, 2, 3, 4, 5)
    world.join("a")
    world.expire(0, 2, 3)
    assert world.offsets("a") == [1, 4]
    assert world.group().expired == 3
    world.ack("a", (1, 2), (4, 5))
    assert world.floor == 5


@pytest.mark.parametrize("mode", ["concurrent", "ordered", "broadcast"])
def test_behind_a_thousand_expired_messages_the_next_is_found_at_once(
    world: ExpiringWorld, mode: str
) -> None:
    for _ in range(100):
        world.publish("t", *range(10))
    world.publish("t", 7)
    world.join("a", mode=mode)
    group = "g@a" if mode == "broadcast" else "g"
    world.expire(*range(1_000))
    assert world.offsets("a", group=group, most=20) == [1_000]
    assert world.group(group).expired == 1_000


def test_a_returned_message_may_have_expired(world: ExpiringWorld) -> None:
    world.publish("t", 1, 2, 3)
    world.join("a")
    assert world.offsets("a") == [0, 1, 2]
    world.return_messages("a", (0, 3))
    world.expire(1)
    assert world.offsets("a") == [0, 2]
    world.ack("a", (0, 3))
    assert world.floor == 3


def test_an_expired_retry_frees_its_key(world: ExpiringWorld) -> None:
    world.publish("t", 1, 1, 2)
    world.join("a", mode="ordered", retry=QUICK)
    world.offsets("a")
    world.nack("a", 0)
    world.return_messages("a", (1, 2))
    world.ack("a", (2, 3))
    world.expire(0)
    world.now += 10_000_000
    assert world.offsets("a") == [1]
    world.ack("a", (1, 2))
    assert world.floor == 3
    assert world.group().expired == 1
    assert not world.group().fences.get(1)


def test_a_fetch_of_only_expired_messages_leases_nothing_and_plans_again(
    world: ExpiringWorld,
) -> None:
    world.publish("t", 1)
    world.join("a")
    world.expire(0)
    picks = world.read_candidates(world.choose("a").candidates)
    reply = world.do(Deliver("g", "a", world.generation(), picks))
    assert (reply.lease, reply.deliveries, reply.again) == (0, (), True)
    assert not world.group().leases


@pytest.mark.parametrize("seed", range(10))
def test_in_random_work_each_message_is_delivered_or_expired_and_keys_keep_their_order(
    world: ExpiringWorld, seed: int
) -> None:
    rng = Random(seed)
    world.join("a", mode="ordered", retry=QUICK)
    done: list[int] = []
    for _ in range(40):
        end = world.state.topics["t"].end_offsets[0]
        size = rng.randint(1, 5)
        world.publish("t", *(rng.randint(1, 3) for _ in range(size)))
        world.expire(*(o for o in range(end, end + size) if rng.random() < 0.3))
        for offset in world.offsets("a", most=rng.randint(1, 10)):
            assert (0, offset) not in world.over
            if rng.random() < 0.2:
                world.nack("a", offset)
                world.expire(*([offset] if rng.random() < 0.5 else []))
            else:
                done.append(offset)
                world.ack("a", (offset, offset + 1))
        world.now += rng.randint(0, 3_000_000)
    end = world.state.topics["t"].end_offsets[0]
    for _ in range(50):
        world.now += 10_000_000
        for offset in world.offsets("a"):
            done.append(offset)
            world.ack("a", (offset, offset + 1))
    letters = world.group().letters
    assert world.floor == end
    assert len(done) == len(set(done))
    assert len(done) + letters + world.group().expired <= end
    again = world.replayed()
    for state in (world.state, again):
        machine.save(state)
    assert rows(again) == rows(world.state)


def test_unwanted_batches_are_passed_unread_even_behind_a_fence(world: ExpiringWorld) -> None:
    for _ in range(4):
        world.publish("t", 1, 2)
    world.join("a", mode="ordered", retry=QUICK)
    assert world.offsets("a", most=2) == [0, 1]
    world.nack("a", 0)
    world.ack("a", (1, 2))
    candidates = world.choose("a").candidates
    assert [c.needs_keys for c in candidates] == [True] * 3
    keys = world.read_candidates(candidates)
    picks = tuple(
        CandidateRead(c, unwanted=True) if c.base_offset < 6 else keys[n]
        for n, c in enumerate(candidates)
    )
    reply = world.do(Deliver("g", "a", world.generation(), picks))
    assert [(d.start, d.end) for d in reply.deliveries] == [(7, 8)]
    world.now += 10_000_000
    assert world.offsets("a") == [0]
    world.ack("a", (0, 1), (7, 8))
    assert world.offsets("a") == [6]
    world.ack("a", (6, 7))
    assert world.floor == 8
    assert world.group().expired == 0
