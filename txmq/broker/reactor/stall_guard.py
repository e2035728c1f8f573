"""Protection of clients from a broker that stood still: their heartbeats may be
unread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

LATE_S = 1.0  # between ticks: the process, or the machine, had stopped
log = structlog.get_logger()


class Moment(NamedTuple):
    """One point in time: the reactor's seconds, and the broker's time in µs."""

    seconds: float
    micros: int


class StallGuard:
    """Calls functions that end silent sessions and leases, but not within a second
    after a tick that came late. By then the heartbeats that waited in the kernel have
    been read.

    The functions judge by a moment from before the look whether the tick is late. So
    nothing ends early where the process is stopped within the tick.
    """

    def __init__(
        self,
        elapsed: Callable[[], float],
        moment: Callable[[], Moment],
        *functions: Callable[[Moment], None],
    ) -> None:
        """`elapsed` gives seconds, and runs on while the machine is suspended."""
        self._elapsed, self._moment, self._functions = elapsed, moment, functions
        self._last: float | None = None
        self._until = float("-inf")

    def tick(self) -> None:
        """Timer: call the functions. Ticks are at most a second apart unless the
        process stalls.
        """
        moment = self._moment()
        now = self._elapsed()
        late = 0.0 if self._last is None else now - self._last
        self._last = now
        if late > LATE_S:
            log.warning("broker.stood_still", seconds=round(late, 1))
            self._until = now + LATE_S
        if now >= self._until:
            for function in self._functions:
                function(moment)
