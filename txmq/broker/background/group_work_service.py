"""Background work on consumer groups: lost leases, deletions, resets, clones and
adopted stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.consumers.background_work import GroupWorkReply
from txmq.core.consumers.commands import AdvanceGroupWork, ExpireLeases
from txmq.crashpoints import crashpoint

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.stall_guard import Moment


class GroupWorkService:
    """Makes one step at a time. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._busy = self._stopped = False

    def expire_leases(self, moment: Moment) -> None:
        """Timer: end leases whose time was up at this moment."""
        self._engine.submit(ExpireLeases(moment.micros))

    def tick(self) -> None:
        """Timer: begin a step, if there is work."""
        groups = self._engine.state.groups
        work = groups.deleted or groups.resetting or groups.cloning or groups.adopting
        if work and not self._busy and not self._stopped:
            self._busy = True
            self._engine.submit(AdvanceGroupWork(), self._stepped)

    def stop(self) -> None:
        """Make no further step; the next start continues."""
        self._stopped = True

    def _stepped(self, reply: object) -> None:
        """Begin the next step once this one is durable; requests come in between."""
        self._busy = False
        if self._engine.state.groups.adopting:
            crashpoint("adoption.after_step")
        if isinstance(reply, GroupWorkReply) and reply.more:
            self.tick()
