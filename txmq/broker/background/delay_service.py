"""Publication of delayed messages when they are due, by the broker's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.topics import delayed
from txmq.core.topics.delay_rules import ForgetRecalls, PublishDue
from txmq.errors import RequestRejected
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock, Timer

# how late the time of a message that has just come, or a clock that was put forward,
# may be noticed
LOOK_AHEAD_S = 0.05


class DelayService:
    """Publishes in steps, one at a time: as many messages as one record takes, again
    while more are due.

    A message that is due before the next tick has a timer of its own, exact to the
    millisecond.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._busy = self._stopped = False
        self._timer: Timer | None = None

    def tick(self) -> None:
        """Timer: publish what is due, or set a timer for what will be due before the
        next tick.
        """
        if self._busy or self._stopped or not self._engine.state.delayed_count:
            return
        first = next(delayed.scan(self._engine.state), None)
        left_s = LOOK_AHEAD_S if first is None else (first.due - self._engine.now()) / SECOND
        if left_s < LOOK_AHEAD_S:
            self._cancel()
            self._timer = self._clock.callLater(max(left_s, 0.0), self._step)

    def forget_recalls(self) -> None:
        """Timer: forget recalls that are too old to be repeated."""
        self._engine.submit(ForgetRecalls(), self._forgot)

    def stop(self) -> None:
        """Publish nothing more; the next start continues."""
        self._stopped = True
        self._cancel()

    def _step(self) -> None:
        if self._busy or self._stopped or self._engine.failed is not None:
            return
        self._busy = True
        self._engine.submit(PublishDue(), self._stepped)

    def _stepped(self, more: bool | RequestRejected) -> None:  # noqa: FBT001  # the core's reply
        self._busy = False
        if more is True and not self._stopped:
            self._timer = self._clock.callLater(0, self._step)
        elif more is False:  # else there was no space: the next look tries again
            self.tick()

    def _forgot(self, more: bool | RequestRejected) -> None:  # noqa: FBT001  # the core's reply
        if more is True and not self._stopped:
            self._clock.callLater(LOOK_AHEAD_S, self.forget_recalls)

    def _cancel(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
