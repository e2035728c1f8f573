"""Poison isolation: messages that kill their consumers are found, no others suffer."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, Received
from txmq.core.consumers.commands import LeaveGroup, PauseGroup, ResetPosition
from txmq.core.consumers.letter_views import list_letters
from txmq.core.consumers.poison import BATCH_LIMITS
from txmq.core.events.consumers import Delivered
from txmq.core.state.failed_messages import ISOLATED_AFTER

MESSAGES, PREFETCH = 3_000, 2_000
KILLERS = (1_100, 1_101)
LIMIT = 3  # deliveries of QUICK that count


def world_of(messages: int, mode: str = "concurrent") -> ConsumersWorld:
    world = ConsumersWorld(t=1)
    world.publish("t", *range(messages))
    world.join("a", mode=mode, retry=QUICK)
    return world


def dies(world: ConsumersWorld, mode: str = "concurrent") -> None:
    """Lose the member and join again with its name."""
    world.do(LeaveGroup("g", "a", "a", lost=True))
    world.join("a", mode=mode, retry=QUICK)


def work(world: ConsumersWorld, mode: str) -> tuple[Counter[int], int]:
    """Let a member that reads ahead work on its messages, and die of KILLERS.

    Returns the processed messages and its deaths.
    """
    done, deaths = Counter[int](), 0
    hand: list[int] = []
    while True:
        hand += world.offsets("a", most=PREFETCH - len(hand))
        if not hand:
            return done, deaths
        batch, hand = hand[:50], hand[50:]
        for offset in batch:
            if offset in KILLERS:
                deaths, hand = deaths + 1, []
                dies(world, mode)
                break
            world.ack("a", (offset, offset + 1))
            done[offset] += 1


@pytest.mark.parametrize("mode", ["concurrent", "ordered"])
def test_exactly_the_messages_that_kill_each_time_become_letters(mode: str) -> None:
    world = world_of(MESSAGES, mode)
    done, deaths = work(world, mode)
    assert done == dict.fromkeys(set(range(MESSAGES)) - set(KILLERS), 1)
    assert deaths <= 2 * (ISOLATED_AFTER + LIMIT)
    found = list_letters(world.state, "g", 0, 10)
    told = {letter.fields["offset"]: letter.fields for letter in found[0]}
    assert told.keys() == set(KILLERS)
    for fields in told.values():
        assert (fields["attempts"], fields["error_type"]) == (LIMIT, "consumer died")
        assert fields["error_text"].startswith(f"{fields['deaths']} consumers died")


def test_batches_of_suspects_shrink_with_every_death() -> None:
    world = world_of(1_000)
    sizes = []
    for _ in range(ISOLATED_AFTER + 2):
        got = world.fetch("a")
        assert all(message.attempt == 1 for message in got[1:])
        sizes.append(len(got))
        dies(world)
    assert sizes == [1_000, *BATCH_LIMITS[1:], 1, 1]
    assert world.fetch("a") == [Received("t", 0, 0, 3)], "the two deaths that it was alone in count"


def test_new_messages_are_delivered_beside_suspects() -> None:
    world = world_of(20)
    world.fetch("a")
    dies(world)
    world.publish("t", 20)
    assert world.offsets("a", most=5) == [0, 1, 2, 3, 4]
    assert world.offsets("a") == [20], "a lot at a time, and other messages meanwhile"
    world.ack("a", (0, 5))
    assert world.offsets("a") == [*range(5, 20)]


def test_nothing_is_delivered_beside_an_isolated_message() -> None:
    world = world_of(2)
    for _ in range(ISOLATED_AFTER):
        world.fetch("a")
        dies(world)
    world.publish("t", 1)
    world.join("b", retry=QUICK)
    first = world.fetch("a")
    assert first == [Received("t", 0, 0, 1)]
    assert world.fetch("a") == []
    assert [lease.single for lease in world.group().leases.values()] == [True]
    world.ack("a", (0, 1))
    assert world.fetch("a") == [Received("t", 0, 1, 1)]
    world.ack("a", (1, 2))
    assert world.fetch("a") == [Received("t", 0, 2, 1)]


def test_a_restart_of_the_broker_neither_counts_nor_makes_suspects() -> None:
    world = world_of(3)
    world.nack("a", world.offsets("a")[0], delay=0)
    for _ in range(LIMIT + 1):
        world.state = world.replayed()
        world.boot()
        world.join("a", retry=QUICK)
        assert sorted(world.fetch("a")) == [
            Received("t", 0, 0, 2),
            Received("t", 0, 1, 1),
            Received("t", 0, 2, 1),
        ]
    assert world.group().suspect_partitions == set()


def test_deaths_of_a_suspect_survive_the_broker() -> None:
    world = world_of(1)
    for number in range(ISOLATED_AFTER + LIMIT):
        expected = max(1, number - ISOLATED_AFTER + 1)
        assert world.fetch("a") == [Received("t", 0, 0, expected)]
        dies(world)
        world.state = world.replayed()
        world.boot()
        world.join("a", retry=QUICK)
        assert world.group().letters == 0
    assert world.fetch("a") == []
    assert world.group().letters == 1


def test_a_returned_suspect_stays_a_suspect() -> None:
    world = world_of(2)
    for _ in range(ISOLATED_AFTER):
        world.fetch("a")
        dies(world)
    assert world.offsets("a") == [0]
    world.return_messages("a", (0, 1))
    assert world.fetch("a") == [Received("t", 0, 0, 1)]
    assert world.group().leases.popitem()[1].single


def test_a_message_that_was_postponed_and_kills_is_found_as_well() -> None:
    world = world_of(1)
    world.fetch("a")
    world.nack("a", 0, postpone=True, delay=0)
    for _ in range(ISOLATED_AFTER + LIMIT):
        assert len(world.fetch("a")) == 1
        dies(world)
        world.now += 10_000_000
    assert world.fetch("a") == []
    assert world.group().letters == 1


def test_suspects_are_delivered_only_once_their_deaths_are_durable() -> None:
    world = world_of(1)
    world.fetch("a")
    dies(world)
    assert not world.early("a")


def test_suspects_are_forgotten_by_a_reset() -> None:
    world = world_of(2)
    world.fetch("a")
    dies(world)
    assert world.group().suspect_partitions == {(1, 0)}
    world.do(ResetPosition("g", "t", "first"))
    assert world.group().suspect_partitions == set()
    assert not [event for event in world.events() if isinstance(event, Delivered) and event.deaths]
    assert world.offsets("a") == [0, 1]


def test_a_suspect_of_a_paused_topic_delays_no_others() -> None:
    world = ConsumersWorld(t=1, u=1)
    world.publish("t", 1)
    world.join("a", "t", "u", retry=QUICK)
    for _ in range(ISOLATED_AFTER):
        world.fetch("a")
        world.do(LeaveGroup("g", "a", "a", lost=True))
        world.join("a", "t", "u", retry=QUICK)
    world.do(PauseGroup("g", paused=True, topic="t"))
    world.publish("u", 1, 2)
    assert world.fetch("a", most=1) == [Received("u", 0, 0, 1)]
    world.do(PauseGroup("g", paused=False, topic="t"))
    assert world.fetch("a") == [], "it waits until the member has nothing else"
    world.ack("a", (0, 1), topic="u")
    assert world.fetch("a") == [Received("t", 0, 0, 1)]
