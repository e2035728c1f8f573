"""A clock that jumps from one call to the next. Twisted's sorts all its calls at each
change, which took half of a seed's time.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Call:
    """A call that was put off."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        self.function: Callable[..., object] | None = function  # None = made, or cancelled
        self.args = args

    def cancel(self) -> None:
        self.function = None

    def active(self) -> bool:
        return self.function is not None


class Clock:
    """Seconds since the beginning of the simulation, monotonic; calls of one time run
    in the order they were made.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.put_back = 0  # microseconds by which the machine's wall clock is wrong
        self._calls: list[tuple[float, int, Call]] = []
        self._made = 0

    def seconds(self) -> float:
        return self._now

    def callLater(
        self, delay: float, function: Callable[..., object], *args: object
    ) -> Any:  # Twisted's
        call = Call(function, args)
        self._made += 1
        heappush(self._calls, (self._now + delay, self._made, call))
        return call

    def next(self) -> None:
        """Go on to the next call, and make it."""
        time, _number, call = heappop(self._calls)
        self._now = max(self._now, time)
        function, call.function = call.function, None
        if function is not None:
            function(*call.args)
