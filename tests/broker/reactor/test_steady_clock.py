"""The broker's clock while the machine's clock is put forward and back."""

from __future__ import annotations

from random import Random

import pytest

from txmq.broker.reactor.steady_clock import BELIEVED_US, SteadyClock
from txmq.model.units import DAY, HOUR, SECOND

LOOK = 50_000


class Machine:
    """A wall clock that can be put wrong, and a monotonic one that cannot."""

    def __init__(self) -> None:
        self.wall, self.passed = 1_700_000_000 * SECOND, 0
        self.clock = SteadyClock(lambda: self.wall, lambda: self.passed / SECOND)

    def go_on(self, micros: int) -> None:
        for _ in range(micros // LOOK):
            self.wall += LOOK
            self.passed += LOOK
            self.clock.compare()


def test_time_is_the_wall_clocks() -> None:
    machine = Machine()
    machine.go_on(10 * SECOND)
    assert machine.clock() == machine.wall
    assert not machine.clock.ahead


def test_a_clock_put_forward_by_seconds_is_believed_at_once() -> None:
    machine = Machine()
    machine.wall += BELIEVED_US
    assert machine.clock() == machine.wall
    machine.go_on(SECOND)
    assert machine.clock() == machine.wall


def test_a_clock_ahead_by_days_for_two_seconds_is_not_believed() -> None:
    machine = Machine()
    machine.go_on(SECOND)
    before = machine.clock()
    machine.wall += 30 * DAY
    assert machine.clock() == before
    machine.go_on(2 * SECOND)
    assert machine.clock() == before + 2 * SECOND
    assert machine.clock.wall_ahead == 30 * DAY
    machine.wall -= 30 * DAY
    assert machine.clock() == machine.wall == before + 2 * SECOND
    machine.go_on(SECOND)
    assert machine.clock() == machine.wall


@pytest.mark.parametrize("jump", [3 * DAY, -3 * DAY])
def test_a_clock_that_is_confirmed_is_followed(jump: int) -> None:
    machine = Machine()
    machine.go_on(SECOND)
    machine.wall += jump
    machine.go_on(SECOND)
    assert abs(machine.clock.wall_ahead - jump) < SECOND
    machine.clock.follow()
    assert machine.clock() == machine.wall
    machine.go_on(SECOND)
    assert machine.clock() == machine.wall


def test_time_goes_on_while_the_clock_is_behind_and_meets_it_again() -> None:
    machine = Machine()
    machine.go_on(SECOND)
    before = machine.clock()
    machine.wall -= 10 * SECOND
    machine.go_on(10 * SECOND)
    passed = machine.clock() - before
    assert 9 * SECOND <= passed <= 10 * SECOND
    machine.go_on(95 * SECOND)
    assert machine.clock() == machine.wall


def test_a_clock_put_back_and_right_again_makes_no_jump() -> None:
    machine = Machine()
    machine.go_on(SECOND)
    before = machine.clock()
    machine.wall -= HOUR
    machine.go_on(SECOND)
    machine.wall += HOUR
    assert before < machine.clock() <= machine.wall
    assert machine.clock() == before + SECOND == machine.wall


def test_time_begins_where_the_log_ends() -> None:
    floor = 1_700_000_100 * SECOND
    wall, passed = 1_700_000_000 * SECOND, 0
    clock = SteadyClock(lambda: wall, lambda: passed / SECOND, floor)
    assert clock() == floor
    passed += SECOND
    assert floor < clock() < floor + SECOND


def test_time_never_goes_back_between_two_comparisons_whatever_the_jumps() -> None:
    rng, machine = Random(7), Machine()
    last = machine.clock()
    for _ in range(2_000):
        if rng.random() < 0.05:
            machine.wall += rng.choice((-1, 1)) * rng.randint(0, rng.choice((HOUR, 100 * DAY)))
        machine.go_on(LOOK)
        assert machine.clock() > last
        last = machine.clock()
