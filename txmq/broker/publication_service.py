"""Works on the backlog of the core: large groups piece by piece, one short step in each
turn of the reactor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.state.state import Rejected
from txmq.core.transactions.large_publication import Advance, Step

if TYPE_CHECKING:
    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import Clock
    from txmq.core.transactions.large_publication import Progress


class Backlog:
    """One step is under way at a time. After a crash the state tells where to go on.

    A step whose record must be durable before the next one, such as the last piece of a
    group, replies only then.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._busy = self._stopped = False
        self._checked: Progress | None = None
        engine.on_durable.append(self.tick)

    def tick(self) -> None:
        """Go on, if there is anything to do."""
        if self._engine.state.backlog and not self._busy and not self._stopped:
            self._busy = True
            self._clock.callLater(0, self._step)

    def stop(self) -> None:
        """No further step: the next start goes on."""
        self._stopped = True

    def _step(self) -> None:
        if self._stopped or self._engine.failed is not None:
            self._busy = False
            return
        self._engine.submit(Advance(self._engine.store.durable, self._checked), self._stepped)

    def _stepped(self, reply: Step | Rejected) -> None:
        self._busy = False
        if isinstance(reply, Rejected):  # no space: the timer tries again
            return
        self._checked = reply.checked
        if not reply.idle:
            self.tick()
