"""The sessions of all connections: made, listed, and flushed together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog
from twisted.internet.protocol import Factory

from txmq.broker.reactor import process_limits
from txmq.broker.reactor.bounded_log import BoundedLog
from txmq.broker.reactor.connection_limits import ConnectionLimits
from txmq.broker.reactor.frame_memory import FrameMemory
from txmq.broker.reactor.protocol import ClientSession, SharedState

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.interfaces import IAddress

    from txmq.broker.reactor.held_sends import HeldSends
    from txmq.broker.reactor.interfaces import Clock, LoginGuard
    from txmq.broker.reactor.protocol import Handle
    from txmq.wire.hello import Hello, Welcome

log = structlog.get_logger()


class SessionFactory(Factory):
    """Makes the sessions, and keeps the list of open ones."""

    noisy = False

    def __init__(
        self,
        handle: Handle,
        welcome: Callable[[Hello], Welcome],
        clock: Clock,
        sends: HeldSends,
        connection_limit: Callable[[], int] = process_limits.connection_limit,
        guard: LoginGuard | None = None,
        per_peer: int = 0,
    ) -> None:
        """`connection_limit` returns the most connections there may be now, of which a
        host has `per_peer` (0 = three quarters). Further ones are closed at once.
        """
        self.frames = FrameMemory(clock)
        self.sends = sends
        self.limits = ConnectionLimits(clock, connection_limit, per_peer)
        warnings = BoundedLog(clock)
        self._shared = SharedState(self.frames, self.sends, self.limits, warnings, guard=guard)
        self._welcome = welcome
        self._make = partial(ClientSession, handle, welcome, clock, self._shared)
        self._open: dict[ClientSession, None] = {}

    def use_lease(self, lease: Callable[[], bool]) -> None:
        """Begin requests only while a node of a cluster has its lease."""
        self._shared.lease = lease

    def go_on(self) -> None:
        """Let sessions go on whose requests waited."""
        if self._shared.stalled:
            self._shared.go_on()

    def buildProtocol(self, addr: IAddress | None) -> ClientSession | None:
        host = str(getattr(addr, "host", addr))
        return self.accept(host) if self.limits.admits(host) else None

    def accept(self, host: str = "", *, is_own: bool = False) -> ClientSession:
        """Return a session for a new connection within the limit, or for the broker
        itself.
        """
        session = self._make()
        session.is_own = is_own
        self._open[session] = None
        self.limits.add(session, host)
        session.on_lost[self] = partial(self._forget, session)
        return session

    def _forget(self, session: ClientSession) -> None:
        self._open.pop(session, None)
        self.limits.remove(session)

    @property
    def all_closed(self) -> bool:
        """Return whether all connections are closed."""
        return not self._open

    def welcome_again(self) -> None:
        """Send all clients the welcome as it is now."""
        for session in list(self._open):
            session.tell(self._welcome)

    def note_deleted(self, user: str) -> None:
        """Have the sessions of a user end when rights are renewed, even if somebody
        adds a user of this name before.
        """
        for session in self._open:
            if session.rights is not None and session.rights.user == user:
                session.user_deleted = True

    def renew_rights(self) -> list[ClientSession]:
        """Take the rights of all users as they are now; return the sessions whose users
        may do something else than before.
        """
        return [session for session in list(self._open) if session.renew_rights()]

    def connected_instances(self) -> set[tuple[str, str]]:
        """Return the connected producer instances (service, name)."""
        return {session.instance for session in self._open if session.instance is not None}

    def ignore_requests(self) -> None:
        """Process no further requests of any client."""
        for session in self._open:
            session.ignore_requests()

    def buffer_replies(self) -> None:
        """Keep replies until `flush_replies`."""
        self._shared.buffering = True

    def flush_replies(self) -> None:
        """Send the buffered replies, each session's at once. Saves a turn of the
        reactor.
        """
        sessions = list(self._shared.unsent)
        self._shared.unsent.clear()
        self._shared.buffering = False
        for session in sessions:
            try:
                session.flush_replies()
            except Exception as error:
                log.exception("session.failed", error=str(error))
                session.transport.abortConnection()

    def close(self) -> None:
        """Close every connection after sending what is written."""
        for session in list(self._open):
            session.transport.loseConnection()
