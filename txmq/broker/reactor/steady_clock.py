"""The broker's clock: the wall clock's time, which never goes back.

Timers, leases and delivery times depend on it. A wall clock that is put forward is
followed at once. If it is put back, time goes on from where it was, a tenth slower,
until the wall clock has caught up. So one hour back delays no message and no lease by
that hour, and nothing is delivered twice.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

SLOWER = 10  # of so many microseconds one is lost while the wall clock is behind
SLACK_US = 2_000  # microseconds: as much as two readings of different clocks may be apart


class SteadyClock:
    """Call it for microseconds since the epoch. A timer calls `compare`, to notice a
    wall clock that was put back.
    """

    def __init__(
        self, wall: Callable[[], int], monotonic: Callable[[], float], floor: int = 0
    ) -> None:
        """`wall` gives microseconds, `monotonic` seconds. Time begins at `floor` at the
        earliest.
        """
        self._wall, self._monotonic = wall, monotonic
        self._read_at, now = monotonic(), wall()
        self._last, self.ahead = max(now, floor), floor > now

    def __call__(self) -> int:
        wall = self._wall()
        return max(wall, self._expected(self._monotonic())) if self.ahead else wall

    def compare(self) -> None:
        """Timer: compare the clocks."""
        read_at, wall = self._monotonic(), self._wall()
        expected = self._expected(read_at)
        self.ahead = expected - wall > SLACK_US
        self._last, self._read_at = expected if self.ahead else wall, read_at

    def _expected(self, read_at: float) -> int:
        passed = int((read_at - self._read_at) * SECOND)
        return self._last + passed - (passed // SLOWER if self.ahead else 0)


def wall_clock() -> int:
    """Return the wall clock's time, in microseconds since the epoch."""
    return time.time_ns() // 1_000
