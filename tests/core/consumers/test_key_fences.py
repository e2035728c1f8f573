"""Key fences of ordered groups: a failed key waits in its order, all others flow."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, Received
from txmq.core import machine
from txmq.core.consumers import key_fences
from txmq.core.consumers.commands import (
    AbandonLetters,
    AlterGroup,
    LeaveGroup,
    ReplayLetters,
    RequestedSettings,
)
from txmq.core.consumers.fetch_choice import ChosenCandidates
from txmq.core.consumers.key_fences import (
    FENCES_PER_FETCH,
    LIFTED,
    LOOKED_AT,
    TRANSITIONS,
    OpenLeases,
    is_stopped,
)
from txmq.core.events.consumers import Acked, DeadLettered, Delivered
from txmq.core.state.consumer_groups import FenceState
from txmq.core.state.failed_messages import ISOLATED_AFTER
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.state.state import State
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import MILLISECOND

SECOND = 1_000_000
RETRYING, DEAD, WAITING = FenceState


@pytest.fixture
def world() -> ConsumersWorld:
    world = ConsumersWorld(t=2)
    world.join("a", mode="ordered", retry=QUICK)
    return world


def fences(world: ConsumersWorld) -> dict[int | None, tuple[FenceState, int, int]]:
    """Return state, head and length of the chain, by key."""
    return {
        key: (fence.state, fence.offset, fence.parked)
        for _topic, key, fence in world.group().all_fences()
    }


def test_later_messages_of_a_failed_key_are_parked_and_others_flow(world: ConsumersWorld) -> None:
    world.publish("t", 7)
    world.fetch("a")
    reply = world.nack("a", 0)
    assert reply.fence_lease == 2
    assert fences(world) == {7: (RETRYING, 0, 0)}
    world.publish("t", 7, 8, 7, None)
    since = len(world.log)
    assert world.fetch("a") == [Received("t", 0, 2, 1), Received("t", 0, 4, 1)]
    (event,) = world.events(since)
    assert isinstance(event, Delivered)
    assert event.ranges == ((1, 0, 2, 3, 1), (1, 0, 4, 5, 1))
    assert [
        (move[:3], FailedMessage(*move[3]).kind, FailedMessage(*move[3]).attempt)
        for move in event.moves
    ] == [
        ((1, 0, 1), FailedKind.PARKED, 0),
        ((1, 0, 3), FailedKind.PARKED, 0),
    ]
    world.ack("a", (2, 5))
    assert world.group().positions[TopicPartition(1, 0)].floor == 5
    assert fences(world) == {7: (RETRYING, 0, 2)}


def test_the_chain_drains_one_by_one_and_the_fence_is_lifted_with_the_last_ack(
    world: ConsumersWorld,
) -> None:
    world.publish("t", 7, 7, 7)
    world.fetch("a", most=1)
    world.nack("a", 0, delay=0)
    assert world.fetch("a") == [Received("t", 0, 0, 2)]
    since = len(world.log)
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Received("t", 0, 1, 1)]
    assert world.fetch("a") == []
    world.ack("a", (1, 2))
    world.fetch("a")
    world.ack("a", (2, 3))
    acks = [event for event in world.events(since) if isinstance(event, Acked)]
    assert [(event.rows, event.fences) for event in acks] == [
        (((1, 0, 0),), ((1, 7, RETRYING, 0, 1, 2),)),
        (((1, 0, 1),), ((1, 7, RETRYING, 0, 2, 2),)),
        (((1, 0, 2),), ((1, 7, LIFTED, 0, 2, 2),)),
    ]
    assert fences(world) == {}
    world.publish("t", 7)
    assert world.fetch("a") == [Received("t", 0, 3, 1)]


def test_a_keyless_message_fences_nothing(world: ConsumersWorld) -> None:
    world.publish("t", None, None)
    world.fetch("a", most=1)
    assert world.nack("a", 0).fence_lease == 0
    assert fences(world) == {}
    assert world.fetch("a") == [Received("t", 0, 1, 1)]


def test_a_fence_holds_in_every_partition(world: ConsumersWorld) -> None:
    world.publish("t", 7)
    world.fetch("a")
    world.nack("a", 0, delay=0)
    world.publish("t", 7, 8, partition=1)
    assert world.fetch("a") == [Received("t", 0, 0, 2), Received("t", 1, 1, 1)]
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Received("t", 1, 0, 1)]


def test_keys_of_other_topics_are_other_keys(world: ConsumersWorld) -> None:
    from txmq.core.topics.topics import CreateTopic

    world.do(CreateTopic("u", 1))
    world.join("a", "t", "u", mode="ordered", retry=QUICK)
    world.publish("t", 7)
    world.fetch("a")
    world.nack("a", 0)
    world.publish("u", 7)
    assert world.fetch("a") == [Received("u", 0, 0, 1)]


def test_returned_messages_are_parked_in_their_order(world: ConsumersWorld) -> None:
    world.publish("t", 7, 7)
    world.fetch("a")
    world.publish("t", 7)
    world.nack("a", 0, delay=0)
    world.fetch("a")
    assert fences(world)[7] == (RETRYING, 0, 1), "the third, while the second is still out"
    world.ack("a", (0, 1))
    assert fences(world)[7] == (WAITING, 0, 1), "who is next cannot be said yet"
    assert world.fetch("a") == []
    world.return_messages("a", (1, 2))
    assert world.fetch("a") == [Received("t", 0, 1, 1)]
    world.ack("a", (1, 2))
    assert world.fetch("a") == [Received("t", 0, 2, 1)]


def test_a_fence_stays_while_older_leases_may_hold_its_key(world: ConsumersWorld) -> None:
    world.publish("t", 7, 7)
    world.fetch("a")
    world.nack("a", 0, delay=0)
    world.fetch("a")
    world.ack("a", (0, 1))
    assert fences(world)[7] == (WAITING, 0, 0)
    world.publish("t", 7)
    assert world.fetch("a") == []
    assert fences(world)[7] == (WAITING, 0, 1)
    world.expire()
    assert world.fetch("a") == [Received("t", 0, 1, 1)]


def test_leases_younger_than_a_fence_hold_up_nothing(world: ConsumersWorld) -> None:
    world.publish("t", 7)
    world.fetch("a")
    world.nack("a", 0, delay=0)
    world.publish("t", 8, 7)
    assert world.offsets("a") == [0, 1]
    world.ack("a", (0, 1))
    assert world.offsets("a") == [2], "though message 1 is still out"


def test_an_exhausted_head_is_a_letter_and_its_chain_waits(world: ConsumersWorld) -> None:
    world.publish("t", 7, 7, 8)
    world.fetch("a", most=1)
    since = len(world.log)
    assert world.nack("a", 0, dead=True).moved == "letter"
    (event,) = world.events(since)
    assert isinstance(event, DeadLettered)
    assert event.fences == ((1, 7, DEAD, 0, 0, 2),)
    assert world.fetch("a") == [Received("t", 0, 2, 1)]
    assert fences(world) == {7: (DEAD, 0, 1)}
    world.now += 3600 * SECOND
    assert world.fetch("a") == []


def test_a_replay_lets_the_chain_go_on_in_its_order(world: ConsumersWorld) -> None:
    world.publish("t", 7, 7)
    world.fetch("a", most=1)
    world.nack("a", 0, dead=True)
    world.fetch("a")
    world.do(ReplayLetters("g", (("t", 0, 0),)))
    assert fences(world) == {7: (RETRYING, 0, 1)}
    assert world.fetch("a") == [Received("t", 0, 0, 1)]
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Received("t", 0, 1, 1)]
    world.ack("a", (1, 2))
    assert fences(world) == {}


def test_an_abandoned_letter_lets_the_chain_go_on(world: ConsumersWorld) -> None:
    world.publish("t", 7, 7)
    world.fetch("a", most=1)
    world.nack("a", 0, dead=True)
    world.fetch("a")
    world.do(AbandonLetters("g", (("t", 0, 0),), "why"))
    assert world.fetch("a") == [Received("t", 0, 1, 1)]
    assert fences(world) == {7: (RETRYING, 1, 0)}


def test_with_skip_the_key_goes_on_without_the_letter(world: ConsumersWorld) -> None:
    world.do(AlterGroup("g", RequestedSettings(on_exhausted="skip")))
    world.publish("t", 7, 7, 7)
    world.fetch("a", most=1)
    assert world.nack("a", 0, dead=True).fence_lease == 0
    assert fences(world) == {}
    world.fetch("a", most=1)
    world.nack("a", 1, delay=0)
    world.fetch("a")
    world.now += 3 * SECOND
    while world.nack("a", 1).moved == "retry":
        world.now += 3 * SECOND
        world.fetch("a")
    assert world.group().letters == 2
    assert world.fetch("a") == [Received("t", 0, 2, 1)], "the head died, the next follows"
    world.ack("a", (2, 3))
    assert fences(world) == {}


def test_letters_of_one_key_are_replayed_in_their_order(world: ConsumersWorld) -> None:
    world.do(AlterGroup("g", RequestedSettings(on_exhausted="skip")))
    world.publish("t", 7, 7, 7)
    world.fetch("a")
    for offset in range(3):
        world.nack("a", offset, dead=True)
    world.do(ReplayLetters("g", (("t", 0, 2), ("t", 0, 0), ("t", 0, 1))))
    assert fences(world) == {7: (RETRYING, 0, 2)}
    for offset in range(3):
        assert world.offsets("a") == [offset]
        world.ack("a", (offset, offset + 1))


def test_a_failure_behind_the_fence_is_parked_with_its_attempts(world: ConsumersWorld) -> None:
    world.publish("t", 7, 7)
    world.fetch("a")
    world.nack("a", 0)
    assert world.nack("a", 1).moved == "parked"
    assert type(world.nack("a", 1)).__name__ == "NotLeased"
    world.now += SECOND
    world.fetch("a")
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Received("t", 0, 1, 2)]


def test_a_message_that_kills_each_time_fences_its_key(world: ConsumersWorld) -> None:
    world.publish("t", 7, 7, 8)
    for _ in range(ISOLATED_AFTER + 3):
        assert world.offsets("a", most=1) == [0]
        world.expire()
    assert world.offsets("a") == [2]
    assert fences(world) == {7: (DEAD, 0, 1)}


def test_a_fence_raised_by_a_fetch_is_younger_than_its_lease(world: ConsumersWorld) -> None:
    world.publish("t", 7, partition=1)
    for _ in range(ISOLATED_AFTER + 3):
        assert len(world.fetch("a")) == 1
        world.expire()
    world.publish("t", 7)
    world.group().next_lease += world.group().next_lease % 2  # the fetch begins with partition 0
    assert world.offsets("a") == [0]
    (fence,) = [fence for _topic, _key, fence in world.group().all_fences()]
    assert (fence.state, fence.partition) == (DEAD, 1)
    assert max(world.group().leases) < fence.first_lease, (
        "the lease may hold the key, so it must be waited for"
    )


def test_retries_go_where_their_partition_goes(world: ConsumersWorld) -> None:
    world.publish("t", 7)
    world.fetch("a")
    world.nack("a", 0, delay=0)
    world.join("b", mode="ordered", retry=QUICK)
    assert list(world.group().members["b"].partitions) == [(1, 1)]
    assert world.fetch("b") == []
    world.do(LeaveGroup("g", "a", "a"))
    assert world.fetch("b") == [Received("t", 0, 0, 2)]


def test_fences_survive_the_broker(world: ConsumersWorld) -> None:
    world.publish("t", 7, 7)
    world.fetch("a", most=1)
    world.nack("a", 0, dead=True)
    world.fetch("a")
    world.boot()
    world.join("a", mode="ordered", retry=QUICK)
    world.publish("t", 7, 8)
    assert world.offsets("a") == [3]
    assert fences(world) == {7: (DEAD, 0, 2)}


def test_a_candidate_without_keys_is_left_out_if_a_fence_was_raised_meanwhile(
    world: ConsumersWorld,
) -> None:
    world.publish("t", 7)
    world.fetch("a")
    world.publish("t", 7)
    found = world.choose("a")
    assert not found.candidates[0].needs_keys
    world.nack("a", 0)
    assert world.deliver("a", world.generation(), found) == []
    assert world.choose("a").candidates[0].needs_keys


def test_every_state_of_a_fence_has_its_steps() -> None:
    assert TRANSITIONS.keys() == {LIFTED, *FenceState}
    steps = {
        (before, after)
        for before, after in product(TRANSITIONS, TRANSITIONS)
        if after in TRANSITIONS[before]
    }
    assert (WAITING, DEAD) not in steps
    assert (WAITING, WAITING) not in steps
    assert (LIFTED, WAITING) not in steps
    assert {after for before, after in steps if before == LIFTED} == {RETRYING, DEAD}


def full(world: ConsumersWorld) -> bool:
    return is_stopped(world.group(), TopicPartition(1, 0))


def test_a_full_chain_stops_its_partition_and_others_flow() -> None:
    world = ConsumersWorld(t=2)
    world.join("a", mode="ordered", retry=QUICK, max_parked=2)
    world.publish("t", 7)
    world.fetch("a")
    world.nack("a", 0, dead=True)
    world.publish("t", 7, 8, 7, 9, 7, 8)
    world.publish("t", 5, partition=1)
    assert world.fetch("a") == [
        Received("t", 0, 2, 1),
        Received("t", 0, 4, 1),
        Received("t", 1, 0, 1),
    ]
    assert fences(world) == {7: (DEAD, 0, 2)}
    assert full(world)
    assert world.choose("a") == ChosenCandidates()
    since = len(world.log)
    assert world.fetch("a") == []
    assert not world.events(since)
    assert machine.load(saved(world).tables).groups == world.state.groups
    world.do(ReplayLetters("g", (("t", 0, 0),)))
    assert world.fetch("a") == [Received("t", 0, 0, 1)]
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Received("t", 0, 1, 1), Received("t", 0, 6, 1)]
    assert fences(world) == {7: (RETRYING, 1, 2)}
    world.ack("a", (1, 2))
    assert world.fetch("a") == [Received("t", 0, 3, 1)]
    world.ack("a", (2, 7))
    assert world.fetch("a") == [Received("t", 0, 5, 1)]
    world.ack("a", (5, 6))
    assert world.fetch("a") == []
    assert not world.group().fences
    assert world.group().positions[TopicPartition(1, 0)].floor == 7


def saved(world: ConsumersWorld) -> State:
    machine.save(world.state)
    return world.state


def test_an_operator_may_allow_more_to_be_parked() -> None:
    world = ConsumersWorld(t=1)
    world.join("a", mode="ordered", retry=QUICK, max_parked=0)
    world.publish("t", 7)
    world.fetch("a")
    world.nack("a", 0, dead=True)
    world.publish("t", 8, 7, 9)
    assert world.fetch("a") == [Received("t", 0, 1, 1)]
    assert world.fetch("a") == []
    assert full(world)
    world.do(AlterGroup("g", RequestedSettings(max_parked=1)))
    assert world.fetch("a") == [Received("t", 0, 3, 1)]
    assert fences(world) == {7: (DEAD, 0, 1)}


def test_messages_delivered_before_are_parked_even_if_the_chain_is_full() -> None:
    world = ConsumersWorld(t=1)
    world.join("a", mode="ordered", retry=QUICK, max_parked=0)
    world.publish("t", 7, 7, 7)
    world.fetch("a")
    world.nack("a", 0, dead=True)
    world.return_messages("a", (1, 3))
    assert world.fetch("a") == []
    assert fences(world) == {7: (DEAD, 0, 2)}
    assert not full(world)


def test_a_slow_message_of_one_partition_holds_up_no_fence_of_another(
    world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait there: the first that are tried are not always the same."""
    monkeypatch.setattr(key_fences, "LOOKED_AT", 2)
    for partition, keys in ((0, (1, 2, 3, 4, 5, 6)), (1, (7, 8, 9))):
        world.publish("t", *keys, partition=partition)
    world.fetch("a")
    for key in range(1, 6):
        world.nack("a", key - 1, delay=0)  # the sixth message is the slow one
    for key in (7, 8):
        world.nack("a", key - 7, delay=0, partition=1)
    world.fetch("a")
    world.ack("a", (0, 5))
    world.ack("a", (0, 2), partition=1)
    assert set(fences(world)) == {1, 2, 3, 4, 5, 7, 8}, "one of each partition is still out"
    world.ack("a", (2, 3), partition=1)
    for _fetch in range(4):
        world.now += MILLISECOND
        world.fetch("a")
    assert {state for state, _offset, _parked in fences(world).values()} == {WAITING}
    assert set(fences(world)) == {1, 2, 3, 4, 5}


def many_waiting(world: ConsumersWorld, count: int) -> None:
    """Let fences of partition 0 wait for a message that its consumer keeps."""
    world.publish("t", *range(count), -1)
    world.fetch("a")
    for offset in range(count):
        world.nack("a", offset, delay=0)
    assert len(world.fetch("a")) == count
    world.ack("a", (0, count))
    assert {state for state, *_rest in fences(world).values()} == {WAITING}


def test_fences_that_wait_for_long_hold_up_no_key_of_another_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are, of which a fetch looks at a few."""
    world = ConsumersWorld(t=2)
    world.join("a", mode="ordered", retry=QUICK, flood_keys=0)
    many_waiting(world, 3 * FENCES_PER_FETCH)
    world.publish("t", 1_000, 1_000, partition=1)
    world.fetch("a")
    world.nack("a", 0, partition=1, delay=0)
    world.fetch("a")
    world.ack("a", (0, 1), partition=1)
    assert fences(world)[1_000][0] is WAITING
    world.return_messages("a", (1, 2), partition=1)
    assert world.fetch("a") == [Received("t", 1, 1, 1)]
    looked_at: list[int] = []
    advance = key_fences.advance

    def counted(state: State, group: Any, topic_id: int, key_hash: int, *more: Any) -> Any:
        looked_at.append(key_hash)
        return advance(state, group, topic_id, key_hash, *more)

    monkeypatch.setattr(key_fences, "advance", counted)
    assert world.fetch("a") == []
    assert 0 < len(looked_at) <= LOOKED_AT
    world.ack("a", (3 * FENCES_PER_FETCH, 3 * FENCES_PER_FETCH + 1))
    while world.fetch("a"):
        pass
    assert fences(world).keys() == {1_000}
    replayed = world.replayed()
    machine.save(replayed)
    loaded = machine.load(replayed.tables)
    assert loaded.groups.by_name["g"].waiting_fences == world.group().waiting_fences


def test_an_ack_of_many_heads_looks_once_for_what_they_wait_for(
    world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish("t", 1, 2, 3, 4)
    world.fetch("a")
    for offset in range(4):
        world.nack("a", offset, delay=0)
    world.fetch("a")
    found: list[TopicPartition] = []
    find = OpenLeases._find

    def counted(self: OpenLeases, tp: TopicPartition) -> int:
        found.append(tp)
        return find(self, tp)

    monkeypatch.setattr(OpenLeases, "_find", counted)
    world.ack("a", (0, 4))
    assert (fences(world), found) == ({}, [TopicPartition(1, 0)])
