"""Circuit breaker: an outage leaves messages in their places, poison still dies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, Received, rows
from txmq.core import machine
from txmq.core.consumers.circuit_breaker import MAX_PAUSE, MIN_PAUSE, WINDOW
from txmq.core.consumers.commands import (
    AlterGroup,
    ExpireLeases,
    PauseGroup,
    RequestedSettings,
)
from txmq.core.consumers.group_views import describe_group
from txmq.core.consumers.stall_reasons import StallContext
from txmq.core.state.failed_rows import FailedKind
from txmq.core.steps import run_to_end
from txmq.model.retry import FailureReport

SECOND = 1_000_000
AWAY = FailureReport("psycopg2.OperationalError", "connection refused", "away")


@pytest.fixture
def world() -> ConsumersWorld:
    """A member with ten messages of ten keys; three keys that fail alike open the
    breaker.
    """
    world = ConsumersWorld(t=1)
    world.publish("t", *range(10))
    world.join("a", retry=QUICK, flood_keys=3)
    world.fetch("a")
    return world


def opened(world: ConsumersWorld) -> ConsumersWorld:
    for offset in range(3):
        world.nack("a", offset, failure=AWAY)
    assert world.group().breaker is not None
    world.return_messages("a", (3, 10))
    return world


def kinds(world: ConsumersWorld) -> set[FailedKind]:
    found: Any = [
        row for name, table in rows(world.state).items() if name == "failed" for _key, row in table
    ]
    return {FailedKind(row[0]) for row in found}


def test_enough_keys_that_fail_alike_open_the_breaker(world: ConsumersWorld) -> None:
    assert [world.nack("a", offset, failure=AWAY).guarded for offset in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    flood = world.group().breaker
    assert flood is not None
    assert flood[:4] == ("away", "psycopg2.OperationalError", world.now, world.now + MIN_PAUSE)
    assert world.group().breaker_openings == 1


@pytest.mark.parametrize("failures", [["away", "gone", "lost"] * 3, [""] * 9])
def test_different_failures_and_failures_without_fingerprint_do_not_open_it(
    world: ConsumersWorld, failures: list[str]
) -> None:
    for offset, fingerprint in enumerate(failures[:5]):
        assert not world.nack("a", offset, failure=AWAY._replace(fingerprint=fingerprint)).guarded


def test_one_key_that_fails_again_and_again_becomes_a_dead_letter(world: ConsumersWorld) -> None:
    for _ in range(2):
        assert world.nack("a", 0, failure=AWAY).moved == "retry"
        world.now += 3 * SECOND
        world.fetch("a")
    assert world.nack("a", 0, failure=AWAY).moved == "letter"
    assert world.group().breaker is None


def test_as_many_successes_are_no_outage(world: ConsumersWorld) -> None:
    for offset in (0, 2, 4, 6, 8):
        world.ack("a", (offset + 1, offset + 2))
        assert not world.nack("a", offset, failure=AWAY).guarded


def test_messages_that_the_consumer_buries_or_postpones_do_not_count(world: ConsumersWorld) -> None:
    for offset in range(0, 8, 2):
        assert not world.nack("a", offset, failure=AWAY, postpone=True).guarded
        assert not world.nack("a", offset + 1, failure=FailureReport(), postpone=True).guarded


def test_failures_long_ago_do_not_count(world: ConsumersWorld) -> None:
    world.nack("a", 0, failure=AWAY)
    world.nack("a", 1, failure=AWAY)
    world.now += WINDOW
    assert not world.nack("a", 2, failure=AWAY).guarded


def test_an_open_breaker_lets_one_message_through_that_has_not_failed(
    world: ConsumersWorld,
) -> None:
    opened(world)
    assert world.fetch("a") == []
    world.now += MIN_PAUSE
    assert world.fetch("a") == [Received("t", 0, 3, 1)]
    assert world.fetch("a") == []
    world.join("b", retry=QUICK, flood_keys=3)
    assert world.fetch("b") == []


def test_the_group_delivers_everything_once_a_probe_succeeds(world: ConsumersWorld) -> None:
    opened(world)
    world.now += MIN_PAUSE
    world.fetch("a")
    world.ack("a", (3, 4))
    assert world.group().breaker is None
    assert sorted(message.offset for message in world.fetch("a")) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_an_ack_of_an_earlier_lease_is_no_probe(world: ConsumersWorld) -> None:
    for offset in range(3):
        world.nack("a", offset, failure=AWAY)
    world.ack("a", (3, 10))
    assert world.group().breaker is not None


def test_failed_probes_come_further_apart_and_nothing_dies(world: ConsumersWorld) -> None:
    opened(world)
    seen, pauses = [], []
    for _ in range(30):
        began = world.now
        while not (got := world.fetch("a")):
            world.now += SECOND
        pauses.append(world.now - began)
        seen.append(got[0].offset)
        assert (
            world.nack("a", got[0].offset, failure=AWAY._replace(fingerprint="another")).moved
            == "retry"
        )
    assert pauses[:4] == [MIN_PAUSE, 2 * MIN_PAUSE, 4 * MIN_PAUSE, 8 * MIN_PAUSE]
    assert pauses[-1] == MAX_PAUSE
    assert set(seen) == set(range(10)), "each is a probe at some time"
    assert kinds(world) == {FailedKind.RETRY}
    flood = world.group().breaker
    assert flood is not None
    assert flood.probes == 30


def test_a_lost_probe_is_followed_by_another(world: ConsumersWorld) -> None:
    opened(world)
    world.now += MIN_PAUSE
    assert len(world.fetch("a")) == 1
    world.now += 61 * SECOND
    world.do(ExpireLeases(world.now))
    assert len(world.fetch("a")) == 1


def test_a_plan_from_before_the_opening_is_not_delivered(world: ConsumersWorld) -> None:
    world.publish("t", 20, 21)
    planned = world.choose("a")
    for offset in range(3):
        world.nack("a", offset, failure=AWAY)
    assert world.deliver("a", world.generation(), planned) == []


def test_an_operator_may_close_the_breaker_or_switch_it_off(world: ConsumersWorld) -> None:
    opened(world)
    world.do(PauseGroup("g", paused=False, by="me"))
    world.now += SECOND
    assert len(world.fetch("a")) == 10
    opened(world)
    world.do(AlterGroup("g", RequestedSettings(flood_keys=0)))
    world.now += 2 * SECOND
    assert len(world.fetch("a")) == 10
    for offset in range(10):
        assert not world.nack("a", offset, failure=AWAY).guarded


def test_an_ordered_group_keeps_its_order_while_the_breaker_is_open() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 1, 2, 3, 1, 2, 3)
    world.join("a", mode="ordered", retry=QUICK, flood_keys=3)
    world.fetch("a", most=3)
    for offset in range(3):
        world.nack("a", offset, failure=AWAY)
    seen = []
    for _ in range(12):
        world.now += MIN_PAUSE
        for message in world.fetch("a"):
            seen.append(message.offset)
            world.ack("a", (message.offset, message.offset + 1))
    assert sorted(seen) == list(range(6))
    assert all(seen.index(offset) < seen.index(offset + 3) for offset in range(3))


def test_an_open_breaker_is_shown_and_survives_a_restart(world: ConsumersWorld) -> None:
    opened(world)
    shown = run_to_end(describe_group(world.state, "g", StallContext(1 << 60, world.now)))
    assert isinstance(shown, dict)
    assert (shown["state"], shown["floods"], shown["flood"]["fingerprint"]) == (
        "guarded",
        1,
        "away",
    )
    assert shown["positions"][0]["reason"] == "guarded"
    machine.save(world.state)
    assert machine.load(world.state.tables).groups == world.state.groups
    assert world.replayed().groups == world.state.groups
    world.boot()
    world.join("a", retry=QUICK, flood_keys=3)
    assert world.fetch("a") == []
