"""A broker that stood still reads all heartbeats before it ends sessions."""

from __future__ import annotations

import pytest
from twisted.internet.task import Clock

from txmq.broker.reactor.stall_guard import StallGuard


@pytest.fixture
def clock() -> Clock:
    return Clock()


def turns(clock: Clock, reprieve: StallGuard, *seconds: float) -> None:
    for pause in seconds:
        clock.advance(pause)
        reprieve.tick()


def test_every_tick_in_time_ends_silent_sessions(clock: Clock) -> None:
    called: list[float] = []
    turns(clock, StallGuard(clock.seconds, lambda: called.append(clock.seconds())), 0.25, 0.25, 0.5)
    assert called == [0.25, 0.5, 1.0]


def test_fault_40_after_a_block_nothing_ends_for_a_second_and_everything_after_it(
    clock: Clock,
) -> None:
    called: list[float] = []
    reprieve = StallGuard(clock.seconds, lambda: called.append(clock.seconds()))
    turns(clock, reprieve, 0.25)
    turns(clock, reprieve, 30.0, *[0.25] * 5)
    assert called == [0.25, 31.25, 31.5]


def test_the_first_turn_is_never_late(clock: Clock) -> None:
    called: list[float] = []
    turns(clock, StallGuard(clock.seconds, lambda: called.append(clock.seconds())), 500.0)
    assert called == [500.0]
