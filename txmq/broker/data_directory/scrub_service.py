"""Reads the log again in the background, slowly: what has rotted is found before
somebody needs it.

A part at a time, in a thread; then a pause, by the rate that is allowed, and so many
times as long as the part took that nobody notices it. What is damaged is quarantined
and told of (`log.damaged` among the alarms).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from twisted.python.failure import Failure

from txmq.errors import StoreError
from txmq.store.scrub import scrub, spans

if TYPE_CHECKING:
    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import Clock, InThread, Timer
    from txmq.config.storage import Scrub
    from txmq.store.scan import Damage

MIB = 1 << 20
PART = 1 * MIB
PAUSES = 20  # times as long as a part took
HOUR_S = 3_600.0
log = structlog.get_logger()


class Scrubbing:
    """One part is under way at a time. `position` is where the next one begins,
    `rounds` how often all was read.
    """

    def __init__(self, engine: Engine, settings: Scrub, clock: Clock, in_thread: InThread) -> None:
        self._engine, self._settings, self._clock, self._in_thread = (
            engine,
            settings,
            clock,
            in_thread,
        )
        self._timer: Timer | None = None
        self._busy = False
        self._round_began = 0.0
        self.position = self.rounds = 0

    def start(self) -> None:
        """Begin, if it is wanted at all."""
        if self._settings.every_hours:
            self._round_began = self._clock.seconds()
            self._after(PART / (self._settings.mib_per_s * MIB))

    def stop(self) -> None:
        """No further part."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None

    @property
    def busy(self) -> bool:
        """Whether a part is being read in the thread."""
        return self._busy

    def _after(self, seconds: float) -> None:
        self._timer = self._clock.callLater(seconds, self._part)

    def _part(self) -> None:
        if self._engine.failed is not None:
            return
        store, began = self._engine.store, self._clock.seconds()
        known = spans(store)
        start = max(self.position, known[0].first)
        self._busy = True
        work = self._in_thread(scrub, store.reader, known, start, PART)
        work.addBoth(self._done, start, known[-1].end, began)
        work.addErrback(self._engine.fail)

    def _done(
        self, result: tuple[int, list[Damage]] | Failure, start: int, end: int, began: float
    ) -> None:
        self._busy = False
        if isinstance(result, Failure):
            result.trap(StoreError)  # such as of a segment that retention has removed meanwhile
            log.warning("scrub.failed", position=start, error=str(result.value))
            self.position = end
        else:
            self.position = result[0]
            for damage in self._engine.store.quarantine(result[1]):
                log.error("scrub.damaged", **damage._asdict())
        if self._timer is None:
            return
        took = self._clock.seconds() - began
        pause = max((self.position - start) / (self._settings.mib_per_s * MIB), PAUSES * took)
        self._after(self._pause_of_round(pause) if self.position >= end else pause)

    def _pause_of_round(self, pause: float) -> float:
        """All was read: the next round begins at the beginning, when it is time."""
        self.rounds += 1
        self.position = 0
        due = self._round_began + self._settings.every_hours * HOUR_S
        pause = max(pause, due - self._clock.seconds())
        self._round_began = self._clock.seconds() + pause
        return pause
