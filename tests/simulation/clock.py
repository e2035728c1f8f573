"""A clock that jumps from one call to the next.

Twisted's test clock sorts all calls at each change, which took half of the time of a
seed.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class DelayedCall:
    """A call that is due later, and can be cancelled."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        self.function: Callable[..., object] | None = function  # None = made, or cancelled
        self.args = args

    def cancel(self) -> None:
        self.function = None

    def active(self) -> bool:
        return self.function is not None


class SimulatedClock:
    """Monotonic seconds since the start. Calls with the same time run in the order of
    their creation.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.put_back = 0  # microseconds by which the machine's wall clock is behind
        self._calls: list[tuple[float, int, DelayedCall]] = []
        self._made = 0

    def seconds(self) -> float:
        return self._now

    # Twisted's
    def callLater(self, delay: float, function: Callable[..., object], *args: object) -> Any:
        call = DelayedCall(function, args)
        self._made += 1
        heappush(self._calls, (self._now + delay, self._made, call))
        return call

    def next(self) -> None:
        """Advance to the next call, and make it."""
        time, _number, call = heappop(self._calls)
        self._now = max(self._now, time)
        function, call.function = call.function, None
        if function is not None:
            function(*call.args)
