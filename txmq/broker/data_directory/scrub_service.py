"""Scrubbing: the log read again, slowly, so that damage is found before a reader meets
it.

A thread reads one step at a time. The pause after it follows from the allowed rate, and
is a multiple of the step's time, so that scrubbing takes little of the disk. Damage is
quarantined and raises the alarm `log.damaged`. A node that follows mends it with what
the leader has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from twisted.python.failure import Failure

from txmq.errors import StoreError, TxmqError
from txmq.model.units import MIB
from txmq.store.log.scrub import durable_spans, scrub

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.defer import Deferred

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock, RunInThread, Timer
    from txmq.config.broker import ScrubSettings
    from txmq.store.log.decoder import Damage

STEP_BYTES = 1 * MIB
PAUSE_FACTOR = 20  # times as long as the step took
HOUR_S = 3_600.0
MEND_AGAIN_S = 30.0
log = structlog.get_logger()


class ScrubService:
    """Makes one step at a time. `position` is where the next one begins, `rounds` the
    number of complete rounds. `mend` gives the spans that it has mended.
    """

    def __init__(
        self, engine: Engine, settings: ScrubSettings, clock: Clock, in_thread: RunInThread
    ) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock
        self._in_thread = in_thread
        self._timer: Timer | None = None
        self._busy = False
        self._round_began = 0.0
        self.position = self.rounds = 0
        self.mend: Callable[[list[Damage]], Deferred[list[Damage]]] | None = None

    def start(self) -> None:
        """Begin, if scrubbing is configured."""
        if self._settings.every_hours:
            self._round_began = self._clock.seconds()
            self._after(STEP_BYTES / (self._settings.mib_per_s * MIB))

    def stop(self) -> None:
        """Make no further step."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None

    @property
    def busy(self) -> bool:
        """Return whether the thread reads a step."""
        return self._busy

    def _after(self, seconds: float) -> None:
        self._timer = self._clock.callLater(seconds, self._step)

    def _step(self) -> None:
        if self._engine.failed is not None:
            return
        store, began = self._engine.store, self._clock.seconds()
        known = durable_spans(store)
        start = max(self.position, known[0].first)
        self._busy = True
        work = self._in_thread(scrub, store.reader, known, start, STEP_BYTES)
        work.addBoth(self._done, start, known[-1].end, began)
        work.addErrback(self._engine.fail)

    def _done(
        self, result: tuple[int, list[Damage]] | Failure, start: int, end: int, began: float
    ) -> None:
        self._busy = False
        if isinstance(result, Failure):
            result.trap(StoreError)  # retention may have removed the segment meanwhile
            log.warning("scrub.failed", position=start, error=str(result.value))
            self.position = end
        else:
            self.position = result[0]
            found = self._engine.store.quarantine(result[1])
            for damage in found:
                log.error("scrub.damaged", **damage._asdict())
            self._mend(found)
        if self._timer is None:
            return
        took = self._clock.seconds() - began
        pause = max((self.position - start) / (self._settings.mib_per_s * MIB), PAUSE_FACTOR * took)
        self._after(self._pause_of_round(pause) if self.position >= end else pause)

    def _mend(self, damages: list[Damage]) -> None:
        """Have spans mended, again and again while somebody may do it."""
        if damages and self._timer is not None and self.mend is not None:
            work = self.mend(damages)
            work.addErrback(_not_mended).addCallback(self._mended, damages)
            work.addErrback(self._engine.fail)

    def _mended(self, mended: list[Damage], damages: list[Damage]) -> None:
        self._engine.store.trust(mended)
        for damage in mended:
            log.warning("scrub.mended", **damage._asdict())
        if left := [damage for damage in damages if damage not in mended]:
            self._clock.callLater(MEND_AGAIN_S, self._mend, left)

    def _pause_of_round(self, pause: float) -> float:
        """Return the pause until the next round, and begin that at the log's start."""
        self.rounds += 1
        self.position = 0
        due = self._round_began + self._settings.every_hours * HOUR_S
        pause = max(pause, due - self._clock.seconds())
        self._round_began = self._clock.seconds() + pause
        return pause


def _not_mended(failure: Failure) -> list[Damage]:
    failure.trap(TxmqError)  # nobody leads, or cannot be reached
    log.warning("scrub.not_mended", error=str(failure.value))
    return []
