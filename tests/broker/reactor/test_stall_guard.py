"""A broker that stood still reads all heartbeats before it ends sessions."""

from __future__ import annotations

import pytest
from twisted.internet.task import Clock

from txmq.broker.reactor.stall_guard import Moment, StallGuard
from txmq.model.units import SECOND


@pytest.fixture
def clock() -> Clock:
    return Clock()


def guarded(clock: Clock, called: list[float]) -> StallGuard:
    return StallGuard(
        clock.seconds,
        lambda: Moment(clock.seconds(), int(clock.seconds() * SECOND)),
        lambda moment: called.append(moment.seconds),
    )


def turns(clock: Clock, reprieve: StallGuard, *seconds: float) -> None:
    for pause in seconds:
        clock.advance(pause)
        reprieve.tick()


def test_every_tick_in_time_ends_silent_sessions(clock: Clock) -> None:
    called: list[float] = []
    turns(clock, guarded(clock, called), 0.25, 0.25, 0.5)
    assert called == [0.25, 0.5, 1.0]


def test_fault_40_after_a_block_nothing_ends_for_a_second_and_everything_after_it(
    clock: Clock,
) -> None:
    called: list[float] = []
    reprieve = guarded(clock, called)
    turns(clock, reprieve, 0.25)
    turns(clock, reprieve, 30.0, *[0.25] * 5)
    assert called == [0.25, 31.25, 31.5]


def test_the_first_turn_is_never_late(clock: Clock) -> None:
    called: list[float] = []
    turns(clock, guarded(clock, called), 500.0)
    assert called == [500.0]


def test_fault_40_a_stop_within_the_tick_ends_nothing_by_the_time_after_it(clock: Clock) -> None:
    called: list[Moment] = []

    def moment() -> Moment:
        return Moment(clock.seconds(), int(clock.seconds() * SECOND))

    def stopped_after_the_look() -> float:
        looked = clock.seconds()
        clock.advance(30.0)
        return looked

    StallGuard(stopped_after_the_look, moment, called.append).tick()
    assert called == [Moment(0.0, 0)]
    called.clear()

    def stopped_before_the_look() -> Moment:
        read = moment()
        clock.advance(30.0)
        return read

    stopped = StallGuard(clock.seconds, stopped_before_the_look, called.append)
    stopped.tick()
    stopped.tick()
    assert called == [Moment(30.0, 30 * SECOND)]
