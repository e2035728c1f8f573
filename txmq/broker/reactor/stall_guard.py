"""Nobody is given up for lost in the moment after the broker itself stood still: what
they said may not be read yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.reactor.protocols import Clock

LATE_S = 1.0  # a turn that comes so late: the process, or the machine, had stopped
log = structlog.get_logger()


class Reprieve:
    """Calls functions that end what has been silent for too long: sessions, leases; but
    not within a second after a turn that came late. By then the heartbeats that wait in
    the kernel have been read.
    """

    def __init__(self, clock: Clock, *functions: Callable[[], None]) -> None:
        self._clock, self._functions = clock, functions
        self._last: float | None = None
        self._until = float("-inf")

    def tick(self) -> None:
        """A turn. They come at least every second, as long as nothing stands still."""
        now = self._clock.seconds()
        late = 0.0 if self._last is None else now - self._last
        self._last = now
        if late > LATE_S:
            log.warning("broker.stood_still", seconds=round(late, 1))
            self._until = now + LATE_S
        if now >= self._until:
            for function in self._functions:
                function()
