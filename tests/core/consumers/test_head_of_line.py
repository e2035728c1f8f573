"""Poison or outage: the two numbers of a partition's window, and what they decide."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core.consumers import head_of_line
from txmq.core.consumers.head_of_line import Window
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
