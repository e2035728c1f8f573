"""How long the disk takes: on that depends who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.reactor.protocols import Clock

WEIGHT = 1 / 8  # of the newest write in the mean


class Timed:
    """Makes the log's writes, one at a time, on whatever thread, and takes their
    time.
    """

    def __init__(self, clock: Clock, quick_s: float) -> None:
        """A disk is quick whose writes take less than `quick_s` in the mean; 0 = none
        is.
        """
        self._clock, self._quick_s, self._mean_s = clock, quick_s, 0.0

    @property
    def quick(self) -> bool:
        """Whether the disk is quick; one that is not known yet is taken for it."""
        return self._mean_s < self._quick_s

    def __call__(self, write: Callable[..., None], *args: object) -> None:
        """Write."""
        began = self._clock.seconds()
        write(*args)
        self._mean_s += WEIGHT * (self._clock.seconds() - began - self._mean_s)
