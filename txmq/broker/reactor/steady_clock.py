"""The broker's clock: the wall clock's time as far as it can be believed.

Timers, leases and delivery times depend on it. It never goes back by itself, and goes
forward only as fast as time passes:

- A clock that nobody can set tells how much time has passed (`elapsed_clock`).
- The wall clock is followed while it is at most `BELIEVED_US` ahead of that.
- A wall clock that is further ahead is not believed. Time passes on, and the wall clock
  is followed again once it is right, or once it is confirmed (`follow`).
- If the wall clock is put back, time goes on from where it was, a tenth slower, until
  the wall clock has caught up, or until it is confirmed. So one hour back delays no
  message and no lease by that hour, and nothing is delivered twice.

What happened while the broker was down, `core/retention/broker_time.py` judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from txmq.model.units import MINUTE, SECOND

SLOWER = 10  # of so many microseconds one is lost while the wall clock is behind
SLACK_US = 2_000  # microseconds: as much as two readings of different clocks may be apart
# Daemons step a running clock by seconds. More is a machine that was set wrong, or one
# that its host had paused: both are rare, and the first may delete what is not old.
BELIEVED_US = MINUTE
ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class MachineClocks(NamedTuple):
    """Clocks of a broker: the wall clock in microseconds since the epoch, and seconds
    of a clock that nobody sets. Tests give clocks that they move.
    """

    wall: Callable[[], int]
    elapsed: Callable[[], float]


class SteadyClock:
    """Call it for microseconds since the epoch. A timer calls `compare`, to notice a
    wall clock that was set.
    """

    def __init__(
        self, wall: Callable[[], int], elapsed: Callable[[], float], floor: int = 0
    ) -> None:
        """`wall` gives microseconds, `elapsed` seconds. Time begins at `floor` at the
        earliest.
        """
        self.wall, self.elapsed = wall, elapsed
        self._read_at, now = elapsed(), wall()
        self._last, self.ahead = max(now, floor), floor > now

    def __call__(self) -> int:
        read_at, wall = self.elapsed(), self.wall()
        ahead = wall - self._last - (read_at - self._read_at) * SECOND
        if not self.ahead and -SLACK_US <= ahead <= BELIEVED_US:
            return wall
        expected = self._expected(read_at)
        return max(wall, expected) if wall - expected <= BELIEVED_US else expected

    @property
    def wall_ahead(self) -> int:
        """The microseconds by which the wall clock is ahead of the broker's time;
        negative = behind.
        """
        return self.wall() - self._expected(self.elapsed())

    def compare(self) -> None:
        """Timer: compare the clocks."""
        read_at, wall = self.elapsed(), self.wall()
        expected = self._expected(read_at)
        self.ahead = expected - wall > SLACK_US
        believed = not self.ahead and wall - expected <= BELIEVED_US
        self._last, self._read_at = wall if believed else expected, read_at

    def follow(self) -> None:
        """Believe the wall clock, whatever it says."""
        self._read_at, self._last, self.ahead = self.elapsed(), self.wall(), False

    def _expected(self, read_at: float) -> int:
        passed = round((read_at - self._read_at) * SECOND)
        return self._last + passed - (passed // SLOWER if self.ahead else 0)


def wall_clock() -> int:
    """Return the wall clock's time, in microseconds since the epoch."""
    return time.time_ns() // 1_000


def elapsed_clock() -> float:
    """Return seconds of a clock that nobody can set, and that runs on while the machine
    is suspended where the system has one.
    """
    return time.clock_gettime(ELAPSED)


THIS_MACHINE = MachineClocks(wall_clock, elapsed_clock)
