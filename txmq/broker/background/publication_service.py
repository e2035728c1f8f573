"""Publication of large bundles: piece by piece, one short step in each turn of the
reactor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.transactions.large_publication import AdvanceBacklog, BacklogStep
from txmq.errors import RequestRejected

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.core.transactions.large_publication import CheckedPieces


class PublicationService:
    """Works on the core's backlog, one step at a time. After a crash the state says
    where to continue.

    The reply to a step whose record must be durable before the next one, such as the
    last piece of a bundle, waits for the disk.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._busy = self._stopped = False
        self._checked: CheckedPieces | None = None
        engine.on_backlog.append(self.tick)

    def tick(self) -> None:
        """Begin a step, if the backlog is not empty."""
        if self._engine.state.backlog and not self._busy and not self._stopped:
            self._busy = True
            self._clock.callLater(0, self._step)

    def stop(self) -> None:
        """Make no further step; the next start continues."""
        self._stopped = True

    def _step(self) -> None:
        if self._stopped or self._engine.failed is not None:
            self._busy = False
            return
        self._engine.submit(
            AdvanceBacklog(self._engine.store.durable, self._checked), self._stepped
        )

    def _stepped(self, reply: BacklogStep | RequestRejected) -> None:
        self._busy = False
        if isinstance(reply, RequestRejected):  # the disk is full: the timer tries again
            return
        self._checked = reply.checked
        if not reply.idle:
            self.tick()
