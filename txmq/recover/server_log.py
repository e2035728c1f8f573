"""Traces of prepared branches in the write-ahead log of a database's present server.

A failover to an asynchronous standby, or a restored database, can lose a PREPARE that
was acknowledged. The server may then give the branch's transaction id to another
transaction, whose status says nothing about the branch.

The position of a branch is behind what it wrote and before its PREPARE. Where the
present timeline left the branch's own before that position, the PREPARE is lost. Where
it left later, what the branch wrote was replayed, so that its id is not given again:
the status then tells the truth, "aborted" for a lost PREPARE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.tx.postgres.blocking import read_history, read_server
from txmq.tx.postgres.identity import Server, TimelineHistory, format_lsn

if TYPE_CHECKING:
    from txmq.model.decider import BranchPosition
    from txmq.tx.postgres.session import Connection


class BranchTrace(NamedTuple):
    """The answer of a server's log about a branch.

    `lost` says why its PREPARE is not in the log, `untold` why the server cannot tell.
    With neither the status of the branch's transaction id is its own.
    """

    lost: str = ""
    untold: str = ""

    def or_lost(self, why: str) -> BranchTrace:
        """Return this trace, or one that is lost where this one is believed."""
        return BranchTrace(why) if why and not any(self) else self


class ServerLog(NamedTuple):
    """A server, with the history of its timeline if it is needed and can be read."""

    server: Server
    history: TimelineHistory | None = None

    def trace(self, at: BranchPosition | None) -> BranchTrace:
        """Return what the log has of a branch; None = its position is not known."""
        own = self.server.identity.timeline
        if at is None:
            return BranchTrace()
        if own < at.timeline:
            return BranchTrace(
                untold=f"the server is on timeline {own}, behind the branch's {at.timeline}: "
                "it was left behind by a failover"
            )
        if own > at.timeline:
            return self._follow(at)
        if self.server.position < at.position:
            return BranchTrace(
                f"the server's log ends at {format_lsn(self.server.position)}, before the branch's "
                f"{format_lsn(at.position)}: it is a restored database, or a copy"
            )
        return BranchTrace()

    def _follow(self, at: BranchPosition) -> BranchTrace:
        if self.history is None or self.history.trouble:
            trouble = "" if self.history is None else self.history.trouble
            return BranchTrace(untold=f"whether a failover lost it cannot be told: {trouble}")
        timeline, end = self.history.timeline, self.history.ends.get(at.timeline)
        if end is None:
            return BranchTrace(f"timeline {timeline} does not come from the branch's {at.timeline}")
        if end <= at.position:
            return BranchTrace(
                f"timeline {timeline} left {at.timeline} at {format_lsn(end)}, before the "
                f"branch was prepared behind {format_lsn(at.position)}: a failover lost it"
            )
        return BranchTrace()


def read_log(connection: Connection, positions: list[BranchPosition | None]) -> ServerLog:
    """Read what traces of branches at these positions need. Raises DatabaseError."""
    server = read_server(connection)
    own = server.identity.timeline
    earlier = any(at is not None and at.timeline < own for at in positions)
    return ServerLog(server, read_history(connection, own) if earlier else None)
