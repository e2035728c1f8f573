"""Deliveries of what a group has accepted before: no filter has a say there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.consumers.letters_world import Place
from tests.core.consumers.world import QUICK, ConsumersWorld
from tests.core.replay.world import PlansWorld
from txmq.core.consumers import acks, group_views
from txmq.core.consumers.commands import ReplayLetters
from txmq.core.consumers.group_redrives import GiveLetters, GivenLetter
from txmq.core.consumers.letter_trials import TryLetter
from txmq.core.events.consumers import Acked
from txmq.core.state import failed_messages
from txmq.model.retry import FailureReport
from txmq.model.units import SECOND

LETTER: Place = ("a", 0, 0)


def consumers(*keys: int | None, mode: str = "concurrent") -> ConsumersWorld:
    world = ConsumersWorld(t=1)
    world.publish("t", *keys)
    world.join("a", mode=mode, retry=QUICK)
    return world


def failed_rows(world: ConsumersWorld) -> list[object]:
    return [*failed_messages.messages_of_group(world.state, world.group(), None)]


def test_what_nobody_has_judged_goes_on_being_filtered() -> None:
    world = consumers(1, 2, 3)
    assert (world.offsets("a"), world.accepted) == ([0, 1, 2], set())
    world.expire()
    assert (world.offsets("a", most=2), world.accepted) == ([0, 1], set())
    world.return_messages("a", (0, 2))
    assert (world.offsets("a", most=2), world.accepted) == ([0, 1], set())


def test_a_retry_is_accepted_and_its_neighbours_are_for_themselves() -> None:
    world = consumers(1, 2, 3)
    world.fetch("a")
    world.return_messages("a", (2, 3))
    world.nack("a", 0, delay=0)
    world.nack("a", 1, postpone=True, delay=0, failure=FailureReport())
    for _ in range(2):
        assert (world.offsets("a", most=4), world.accepted) == ([0, 1, 2], {0, 1})
        world.return_messages("a", (0, 3))


def test_what_was_only_parked_is_not_accepted_though_its_lease_ran_out() -> None:
    world = consumers(7, 7, 7, mode="ordered")
    world.fetch("a", most=2)  # the second one in vain
    world.nack("a", 0, delay=SECOND)
    world.expire()
    assert world.offsets("a") == [0], "the others are parked behind it"
    assert world.accepted == {0}
    world.ack("a", (0, 1))
    for offset in (1, 2):
        assert (world.offsets("a"), world.accepted) == ([offset], set())
        world.nack("a", offset, delay=0)
        assert (world.offsets("a"), world.accepted) == ([offset], {offset})
        world.ack("a", (offset, offset + 1))


def test_neighbours_of_a_batch_are_told_apart() -> None:
    world = consumers(7, 7, 8, mode="ordered")
    world.fetch("a", most=1)
    world.nack("a", 0, delay=0)
    assert world.offsets("a") == [0, 2]
    world.nack("a", 2, delay=0)
    world.ack("a", (0, 1))
    assert (world.offsets("a"), world.accepted) == ([1, 2], {2})


def _replay(world: PlansWorld) -> None:
    world.do(ReplayLetters("g", (LETTER,)))


def _plan(world: PlansWorld) -> None:
    world.create("plan", LETTER)
    world.run_plan("plan")


def _try(world: PlansWorld) -> None:
    world.do(TryLetter("g", LETTER, "m", "ada"))


@pytest.mark.parametrize("put_back", [_replay, _plan, _try])
@pytest.mark.parametrize("dies", [False, True])
def test_a_letter_is_accepted_however_it_comes_back(
    put_back: Callable[[PlansWorld], None],
    dies: bool,  # noqa: FBT001
) -> None:
    world = PlansWorld(1)
    world.publish("a", 7)
    while world.fetch("m"):
        assert not world.accepted
        if dies:  # nobody has ever judged it: an operator does
            world.expire()
        else:
            world.fail(*LETTER, dead=True)
    assert world.open_places() == [LETTER]
    put_back(world)
    assert [one.offset for one in world.fetch("m")] == [0]
    assert world.accepted == {0}


def test_a_letter_that_was_given_to_another_group_is_accepted_there() -> None:
    world = PlansWorld(1)
    world.publish("a", 7)
    world.join("n", "a", group="h")
    assert world.fetch("n", group="h")
    world.ack("n", (0, 1), topic="a", group="h")
    world.fetch("m")
    world.fail(*LETTER, dead=True)
    given = (GivenLetter(LETTER, 1, 0),)
    reply = world.do(GiveLetters("g", "h", given, False, False, "ada", "theirs"))
    assert not reply.refused
    assert [one.offset for one in world.fetch("n", group="h")] == [0]
    assert world.accepted == {0}


def test_what_a_filter_passed_over_is_settled_and_counted_for_itself() -> None:
    world = consumers(1, 2, 3, 4)
    world.fetch("a")
    assert world.ack("a", (0, 1), filtered=((1, 3),)).messages == 3
    assert world.ack("a", filtered=((1, 3), (8, 9))).refused == (("t", 0, 8, 9),), "repeated"
    assert next(iter(world.group().positions.values())).floor == 3
    assert [event.filtered for event in world.events() if isinstance(event, Acked)] == [
        ((1, 0, 1, 3),)
    ]
    assert (world.group().filtered, world.group().expired) == (2, 0)
    assert group_views.count_messages(world.state, world.group(), world.now)["unsettled"] == 1


def test_a_parked_message_that_is_filtered_lets_its_key_go_on() -> None:
    world = consumers(7, 7, 7, mode="ordered")
    world.fetch("a", most=1)
    world.nack("a", 0, delay=0)
    assert world.offsets("a") == [0]
    world.ack("a", (0, 1))
    assert world.offsets("a") == [1]
    world.ack("a", filtered=((1, 2),))
    assert world.offsets("a") == [2]
    world.ack("a", (2, 3))
    assert (world.group().filtered, world.group().fences, failed_rows(world)) == (1, {}, [])


def test_a_probe_that_is_filtered_tells_nothing_and_the_next_one_is_due() -> None:
    world = ConsumersWorld(t=1)
    world.join("a", mode="ordered", retry=QUICK, flood_keys=2)
    world.publish("t", 1, 2, 3, 4)
    world.fetch("a", most=2)
    world.nack("a", 0, delay=0)
    world.nack("a", 1, delay=0)
    assert world.group().breaker is not None
    world.now += 6 * SECOND
    [probe] = world.offsets("a")
    world.ack("a", filtered=((probe, probe + 1),))
    breaker = world.group().breaker
    assert breaker is not None, "no handler has seen the probe"
    assert (breaker.probes, breaker.lease) == (0, 0)
    assert len(world.offsets("a")) == 1, "at once"


def test_a_letter_that_expires_does_not_close_a_circuit_breaker() -> None:
    world = ConsumersWorld(t=1)
    world.join("a", retry=QUICK, flood_keys=2)
    world.publish("t", 1, 2, 3)
    world.fetch("a")
    world.nack("a", 2, dead=True)
    world.nack("a", 0, delay=0)
    world.nack("a", 1, delay=0)
    assert world.group().breaker is not None
    acks.settle_row(world.state, world.group(), (1, 0, 2), "expired")
    assert world.group().breaker is not None
