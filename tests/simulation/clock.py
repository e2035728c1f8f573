"""A clock that jumps from one call to the next. Twisted's sorts all its calls at each change, which took half of a
seed's time.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Call:
    """A call that was put off."""

    __slots__ = ("_args", "_function", "time")

    def __init__(self, time: float, function: Callable[..., object], args: tuple[object, ...]) -> None:
        self.time, self._args = time, args
        self._function: Callable[..., object] | None = function

    def cancel(self) -> None:
        self._function = None

    def active(self) -> bool:
        return self._function is not None

    def run(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function(*self._args)


class Clock:
    """Seconds since the beginning of the simulation; calls of one time run in the order they were made."""

    def __init__(self) -> None:
        self._now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._made = 0

    def seconds(self) -> float:
        return self._now

    def callLater(self, delay: float, function: Callable[..., object], *args: object) -> Any:  # Twisted's
        call = Call(self._now + delay, function, args)
        self._made += 1
        heappush(self._calls, (call.time, self._made, call))
        return call

    def next(self) -> None:
        """Go on to the next call, and make it."""
        time, _number, call = heappop(self._calls)
        self._now = max(self._now, time)
        call.run()
