"""Publishes delayed messages when they are due, by the broker's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.state.state import Rejected
from txmq.core.topics import delayed
from txmq.core.topics.delay_rules import ForgetRecalls, PublishDue

if TYPE_CHECKING:
    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import Clock, Timer

# how late the time of a message that has just come, or a clock that was put forward,
# may be noticed
LOOK_S = 0.05
SECOND = 1_000_000


class Delays:
    """One step is under way at a time: as many messages as one record takes, and again
    while there are more.

    What is due within the next look has a timer of its own, to the millisecond.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._busy = self._stopped = False
        self._timer: Timer | None = None

    def tick(self) -> None:
        """Timer: publish what is due, or see to it that it will be."""
        if self._busy or self._stopped or not self._engine.state.delayed:
            return
        first = next(delayed.rows(self._engine.state), None)
        left_s = LOOK_S if first is None else (first.due - self._engine.now()) / SECOND
        if left_s < LOOK_S:
            self._cancel()
            self._timer = self._clock.callLater(max(left_s, 0.0), self._step)

    def sweep(self) -> None:
        """Timer: forget recalls that nobody will repeat any more."""
        self._engine.submit(ForgetRecalls(), self._swept)

    def stop(self) -> None:
        """Nothing more is published: the next start goes on."""
        self._stopped = True
        self._cancel()

    def _step(self) -> None:
        if self._busy or self._stopped or self._engine.failed is not None:
            return
        self._busy = True
        self._engine.submit(PublishDue(), self._stepped)

    def _stepped(self, more: bool | Rejected) -> None:  # the core's reply
        self._busy = False
        if more is True and not self._stopped:
            self._timer = self._clock.callLater(0, self._step)
        elif more is False:  # else there was no space: the next look tries again
            self.tick()

    def _swept(self, more: bool | Rejected) -> None:  # the core's reply
        if more is True and not self._stopped:
            self._clock.callLater(LOOK_S, self.sweep)

    def _cancel(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
