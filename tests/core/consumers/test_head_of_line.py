"""Poison or outage: the two numbers of a partition's window, and what they decide."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core.consumers import head_of_line
from txmq.core.consumers.commands import ResetPosition
from txmq.core.consumers.head_of_line import Window
from txmq.core.state import failed_messages
from txmq.core.state.positions import MAX_FILTERED
from txmq.model.retry import FailureReport
from txmq.model.topic_partition import TopicPartition

SECOND = 1_000_000
AWAY = FailureReport("psycopg2.OperationalError", "connection refused", "away")


def window(world: ConsumersWorld) -> Window:
    tp = TopicPartition(world.state.topics["t"].topic_id, 0)
    return head_of_line.window_of(world.state, world.group(), tp, world.now)


@pytest.fixture(params=["concurrent", "ordered"])
def world(request: pytest.FixtureRequest) -> ConsumersWorld:
    """A member with forty messages of forty keys."""
    world = ConsumersWorld(t=1)
    world.publish("t", *range(40))
    world.join("a", mode=request.param, retry=QUICK, flood_keys=3)
    world.fetch("a")
    return world


def test_a_window_that_moves_is_neither(world: ConsumersWorld) -> None:
    assert window(world)[:4] == (0, 40, 40, 0)
    assert window(world).word == ""
    world.ack("a", (0, 40))
    assert window(world) == Window(40)


def test_one_that_fails_while_the_others_go_through_is_poison(world: ConsumersWorld) -> None:
    world.nack("a", 0, failure=AWAY)
    world.ack("a", (1, 39))
    assert window(world).word == ""
    world.now += 20 * SECOND
    seen = window(world)
    assert (seen.head, seen.word) == (0, "poison")
    assert (seen.unprocessed_share, seen.processed_share) == (0.05, 0.95)


def test_where_most_wait_it_is_an_outage(world: ConsumersWorld) -> None:
    world.nack("a", 0, failure=AWAY)
    world.nack("a", 1, failure=AWAY)
    world.return_messages("a", (2, 40))
    world.now += 20 * SECOND
    assert (window(world).word, window(world).unprocessed_share) == ("outage", 1.0)


@pytest.mark.parametrize("others", [0, 5])
def test_one_key_with_parked_followers_is_no_outage(others: int) -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", *[7] * 20, *range(100, 100 + others))
    world.join("a", mode="ordered", retry=QUICK)
    world.fetch("a")
    world.nack("a", 0, failure=AWAY)
    world.return_messages("a", (1, 20))
    world.ack("a", (20, 20 + others))
    world.fetch("a")
    world.now += 20 * SECOND
    seen = window(world)
    assert (seen.head, seen.size, seen.unprocessed, seen.processed) == (0, 1 + others, 1, others)
    assert seen.word == ("poison" if others else "")


def test_dead_letters_are_neither_processed_nor_waiting(world: ConsumersWorld) -> None:
    for offset in range(1, 30):
        world.nack("a", offset, dead=True)
    world.now += 20 * SECOND
    assert window(world)[:4] == (0, 40, 11, 0)
    assert window(world).word == ""


def test_poison_heads_that_fail_again_open_no_breaker(world: ConsumersWorld) -> None:
    for offset in range(2):
        world.nack("a", offset, failure=AWAY)
    world.ack("a", (2, 40))
    world.publish("t", *range(100, 140))
    assert set(world.offsets("a")) == set(range(40, 80))
    world.ack("a", (40, 80))
    world.now += 2 * SECOND
    world.fetch("a")
    before = world.group().failure_window.failed
    assert not world.nack("a", 0, failure=AWAY).guarded
    assert world.group().failure_window.failed == before


def test_in_an_outage_second_failures_count_as_before(world: ConsumersWorld) -> None:
    for offset in range(2):
        world.nack("a", offset, failure=AWAY)
    world.now += 2 * SECOND
    world.fetch("a")
    assert not world.nack("a", 0, failure=AWAY).guarded
    assert world.nack("a", 2, failure=AWAY).guarded


def test_what_filters_passed_over_makes_no_poison_of_an_outage(world: ConsumersWorld) -> None:
    world.ack("a", filtered=((1, 20), (21, 40)))
    for _ in range(2):
        for offset in (0, 20):
            world.nack("a", offset, delay=0, failure=AWAY)
        assert world.offsets("a") == [0, 20]
    world.now += 20 * SECOND
    seen = window(world)
    assert (seen.size, seen.word, seen.unprocessed_share) == (2, "outage", 1.0)
    row = failed_messages.get(world.state, world.group(), (1, 0, 0))
    assert row is not None
    assert not head_of_line.is_poison(world.group(), (1, 0, 0), row)


def test_only_the_last_filtered_ranges_are_known_and_a_window_begins_there() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", *range(3 * MAX_FILTERED))
    world.join("a", retry=QUICK)
    world.fetch("a")
    world.nack("a", 0, failure=AWAY)
    passed = tuple((offset, offset + 1) for offset in range(1, 3 * MAX_FILTERED, 2))
    world.ack("a", filtered=passed)
    positions = world.group().positions
    assert len(positions[TopicPartition(1, 0)].filtered) == MAX_FILTERED
    assert window(world)[:4] == (MAX_FILTERED + 1, MAX_FILTERED - 1, MAX_FILTERED - 1, 0)
    world.do(ResetPosition("g", "t", "first"))
    assert not positions[TopicPartition(1, 0)].filtered
