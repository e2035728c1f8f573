"""The broker's clock: the wall clock's time, but one that does not stand still while
that is put back.

Timers, leases and times of delivery depend on it. A wall clock that is put forward is
believed at once. One that is put back is not: time goes on from where it was, a tenth
slower, until the wall clock has caught up. So an hour back costs no message and no
lease its time, and nothing comes twice or all at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SLOWER = 10  # of so many microseconds one is lost while the wall clock is behind
SLACK = 2_000  # microseconds: as much as two readings of different clocks may be apart


class SteadyClock:
    """Call it for microseconds since the epoch. `look` has to be called now and then,
    to notice what was put back.
    """

    def __init__(
        self, wall: Callable[[], int], monotonic: Callable[[], float], floor: int = 0
    ) -> None:
        """`wall` in microseconds, `monotonic` in seconds; time begins at `floor` at the
        earliest.
        """
        self._wall, self._monotonic = wall, monotonic
        self._read_at, now = monotonic(), wall()
        self._last, self.ahead = max(now, floor), floor > now

    def __call__(self) -> int:
        wall = self._wall()
        return max(wall, self._expected(self._monotonic())) if self.ahead else wall

    def look(self) -> None:
        """Compare the clocks."""
        read_at, wall = self._monotonic(), self._wall()
        expected = self._expected(read_at)
        self.ahead = expected - wall > SLACK
        self._last, self._read_at = expected if self.ahead else wall, read_at

    def _expected(self, read_at: float) -> int:
        passed = int((read_at - self._read_at) * 1_000_000)
        return self._last + passed - (passed // SLOWER if self.ahead else 0)
