"""The guard against floods: an outage leaves messages where they are, poison still
dies.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumer_world import QUICK, Got, World, rows
from txmq.core import machine
from txmq.core.consumers.circuit_breaker import FIRST_PROBE, LONGEST_PROBE, WATCHED_FOR
from txmq.core.consumers.commands import ExpireLeases, Failure, GroupPause, GroupSet, Wanted
from txmq.core.consumers.failed_messages import Kind
from txmq.core.consumers.queries import show
from txmq.core.consumers.stall_reasons import Seen

SECOND = 1_000_000
AWAY = Failure("psycopg2.OperationalError", "connection refused", "away")


@pytest.fixture
def world() -> World:
    """A member that has ten messages of as many keys; three keys that fail alike are a
    flood.
    """
    world = World(t=1)
    world.publish("t", *range(10))
    world.join("a", retry=QUICK, flood_keys=3)
    world.fetch("a")
    return world


def flooded(world: World) -> World:
    for offset in range(3):
        world.nack("a", offset, failure=AWAY)
    assert world.group().flood is not None
    world.give_back("a", (3, 10))
    return world


def kinds(world: World) -> set[Kind]:
    found: Any = [
        row for name, table in rows(world.state).items() if name == "moved" for _key, row in table
    ]
    return {Kind(row[0]) for row in found}


def test_enough_keys_that_fail_alike_guard_the_group(world: World) -> None:
    assert [world.nack("a", offset, failure=AWAY).guarded for offset in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    flood = world.group().flood
    assert flood is not None
    assert flood[:4] == ("away", "psycopg2.OperationalError", world.now, world.now + FIRST_PROBE)
    assert world.group().floods == 1


@pytest.mark.parametrize("failures", [["away", "gone", "lost"] * 3, [""] * 9])
def test_different_failures_and_those_that_say_nothing_are_no_flood(
    world: World, failures: list[str]
) -> None:
    for offset, fingerprint in enumerate(failures[:5]):
        assert not world.nack("a", offset, failure=AWAY._replace(fingerprint=fingerprint)).guarded


def test_one_key_that_fails_again_and_again_is_poison_and_dies(world: World) -> None:
    for _ in range(2):
        assert world.nack("a", 0, failure=AWAY).moved == "retry"
        world.now += 3 * SECOND
        world.fetch("a")
    assert world.nack("a", 0, failure=AWAY).moved == "letter"
    assert world.group().flood is None


def test_as_many_successes_are_no_outage(world: World) -> None:
    for offset in (0, 2, 4, 6, 8):
        world.ack("a", (offset + 1, offset + 2))
        assert not world.nack("a", offset, failure=AWAY).guarded


def test_what_the_consumer_buries_or_postpones_itself_is_no_failure(world: World) -> None:
    for offset in range(0, 8, 2):
        assert not world.nack("a", offset, failure=AWAY, postpone=True).guarded
        assert not world.nack("a", offset + 1, failure=Failure(), postpone=True).guarded


def test_failures_long_ago_do_not_count(world: World) -> None:
    world.nack("a", 0, failure=AWAY)
    world.nack("a", 1, failure=AWAY)
    world.now += WATCHED_FOR
    assert not world.nack("a", 2, failure=AWAY).guarded


def test_a_guarded_group_gets_one_message_at_a_time_that_did_not_fail_yet(world: World) -> None:
    flooded(world)
    assert world.fetch("a") == []
    world.now += FIRST_PROBE
    assert world.fetch("a") == [Got("t", 0, 3, 1)]
    assert world.fetch("a") == []
    world.join("b", retry=QUICK, flood_keys=3)
    assert world.fetch("b") == []


def test_the_group_goes_on_with_everything_once_a_probe_succeeds(world: World) -> None:
    flooded(world)
    world.now += FIRST_PROBE
    world.fetch("a")
    world.ack("a", (3, 4))
    assert world.group().flood is None
    assert sorted(message.offset for message in world.fetch("a")) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_an_ack_of_what_was_out_before_is_no_probe(world: World) -> None:
    for offset in range(3):
        world.nack("a", offset, failure=AWAY)
    world.ack("a", (3, 10))
    assert world.group().flood is not None


def test_failed_probes_come_further_apart_and_nothing_dies(world: World) -> None:
    flooded(world)
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
    assert pauses[:4] == [FIRST_PROBE, 2 * FIRST_PROBE, 4 * FIRST_PROBE, 8 * FIRST_PROBE]
    assert pauses[-1] == LONGEST_PROBE
    assert set(seen) == set(range(10)), "each is a probe at some time"
    assert kinds(world) == {Kind.RETRY}
    flood = world.group().flood
    assert flood is not None
    assert flood.probes == 30


def test_a_probe_that_gets_lost_is_followed_by_another(world: World) -> None:
    flooded(world)
    world.now += FIRST_PROBE
    assert len(world.fetch("a")) == 1
    world.now += 61 * SECOND
    world.do(ExpireLeases())
    assert len(world.fetch("a")) == 1


def test_what_was_planned_before_the_flood_does_not_go_out_after_it(world: World) -> None:
    world.publish("t", 20, 21)
    planned = world.plan("a")
    for offset in range(3):
        world.nack("a", offset, failure=AWAY)
    assert world.deliver("a", world.generation(), planned) == []


def test_an_operator_may_end_it_and_the_guard_may_be_switched_off(world: World) -> None:
    flooded(world)
    world.do(GroupPause("g", paused=False, by="me"))
    world.now += SECOND
    assert len(world.fetch("a")) == 10
    flooded(world)
    world.do(GroupSet("g", Wanted(flood_keys=0)))
    world.now += 2 * SECOND
    assert len(world.fetch("a")) == 10
    for offset in range(10):
        assert not world.nack("a", offset, failure=AWAY).guarded


def test_an_ordered_group_keeps_its_order_through_a_flood() -> None:
    world = World(t=1)
    world.publish("t", 1, 2, 3, 1, 2, 3)
    world.join("a", mode="ordered", retry=QUICK, flood_keys=3)
    world.fetch("a", most=3)
    for offset in range(3):
        world.nack("a", offset, failure=AWAY)
    seen = []
    for _ in range(12):
        world.now += FIRST_PROBE
        for message in world.fetch("a"):
            seen.append(message.offset)
            world.ack("a", (message.offset, message.offset + 1))
    assert sorted(seen) == list(range(6))
    assert all(seen.index(offset) < seen.index(offset + 3) for offset in range(3))


def test_a_flood_is_shown_and_survives_a_restart(world: World) -> None:
    flooded(world)
    shown = show(world.state, "g", Seen(1 << 60, world.now))
    assert isinstance(shown, dict)
    assert (shown["state"], shown["floods"], shown["flood"]["fingerprint"]) == (
        "guarded",
        1,
        "away",
    )
    assert shown["positions"][0]["reason"] == "guarded"
    machine.save(world.state)
    assert machine.load(world.state.tables).consumers == world.state.consumers
    assert world.replayed().consumers == world.state.consumers
    world.boot()
    world.join("a", retry=QUICK, flood_keys=3)
    assert world.fetch("a") == []
