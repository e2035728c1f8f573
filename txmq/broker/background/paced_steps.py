"""Steps of plans that take milliseconds each, one after the other.

Behind each is a pause as long as the step has taken. So requests have half of the
reactor, however many plans have steps to make.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock

PAUSE_S = 0.002  # at least, behind each step


class PacedSteps:
    """Steps that wait for their turn. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._steps: deque[Callable[[], object]] = deque()
        self._pauses = False

    def add(self, step: Callable[[], object]) -> None:
        """Make a step behind those that wait; at once where none does."""
        self._steps.append(self._engine.later(step))
        if not self._pauses:
            self._next()

    def stop(self) -> None:
        """Make no further step."""
        self._steps.clear()

    def _next(self) -> None:
        self._pauses = bool(self._steps)
        if self._steps:
            began = self._clock.seconds()
            self._steps.popleft()()
            pause = max(PAUSE_S, self._clock.seconds() - began)
            self._clock.callLater(pause, self._next)
