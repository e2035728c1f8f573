"""A pool of connections for all threads: each call borrows an idle one, or opens
another.

Each connection has a producer session. Its sequence has no gaps, because one thread at
a time sends on it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Condition
from uuid import uuid4

from txmq.client.blocking.connections.connection import Connection
from txmq.client.protocol.conversation import client_closed
from txmq.errors import BrokerUnavailable, ConnectionLost, RequestTimeout, Throttled

# A connection that was idle for longer is checked before use. No broker restarts in
# less.
FRESH_S = 0.05


class ProducerSession:
    """A producer session: its id, the sequence of its next message, and its current
    connection.
    """

    __slots__ = ("connection", "idle_since", "prefix", "producer_id", "sequence")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.idle_since = 0.0
        self.renew()

    def renew(self) -> None:
        """Begin a new producer session: the last send of the old one stays in doubt."""
        self.producer_id = uuid4().bytes
        self.prefix = f"{self.producer_id.hex()}-"  # of its message ids
        self.sequence = 0


class ConnectionPool:
    """At most `size` connections, each with a producer session.

    `connect` opens a connection before a deadline, or raises.
    """

    def __init__(self, connect: Callable[[float], Connection], size: int) -> None:
        self.connect = connect
        self._size = size
        self._reset()
        self._closed = False

    def _reset(self) -> None:
        self._idle: deque[ProducerSession] = deque()
        self._changed = Condition()
        self._waiting = 0
        self._open = 0
        self._pid = os.getpid()

    def acquire(self, deadline: float) -> ProducerSession:
        """Return a session with a connection.

        Raises BrokerUnavailable, ClientClosed, and Throttled where all connections stay
        in use.
        """
        if self._pid != os.getpid():
            self._after_fork()
        while not self._closed:
            try:
                # Without the lock: a deque's pop is atomic. The last used one is
                # warmest.
                session = self._idle.pop()
            except IndexError:
                return self._acquire_new(deadline)
            if time.monotonic() - session.idle_since < FRESH_S or not session.connection.is_stale():
                return session
            self._discard(session)
        raise client_closed()

    def acquire_warm(self) -> ProducerSession | None:
        """Return an idle session that was used just now, or None without one."""
        if self._pid != os.getpid() or self._closed:
            return None
        try:
            session = self._idle.pop()
        except IndexError:
            return None
        if time.monotonic() - session.idle_since < FRESH_S:
            return session
        self._idle.append(session)
        return None

    def acquire_if_idle(self, session: ProducerSession) -> bool:
        """Acquire this very session, unless it is in use. Return whether it was
        idle.
        """
        try:
            self._idle.remove(session)
        except ValueError:
            return False
        return True

    def read_available(self) -> None:
        """Read the replies that have come on idle connections, and drop lost ones."""
        for session in list(self._idle):
            if self.acquire_if_idle(session):
                session.connection.read_available()
                self.release(session)

    def release(self, session: ProducerSession) -> None:
        """Return a session to the pool, or drop it where its connection is closed."""
        if session.connection.closed or self._closed or self._pid != os.getpid():
            self._discard(session)
            return
        session.idle_since = time.monotonic()
        self._idle.append(session)
        if self._waiting:
            with self._changed:
                self._changed.notify()

    def reconnect(
        self, session: ProducerSession, deadline: float, lost: ConnectionLost | RequestTimeout
    ) -> None:
        """Give a session another connection: an idle one may lead to where this one was
        lost. Raises `lost` where no broker answers.
        """
        try:
            session.connection = self.connect(deadline)
        except BrokerUnavailable as error:
            raise lost from error

    def close(self) -> None:
        """Close idle connections now, and others when they are released."""
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        while self._idle:
            self._discard(self._idle.pop())

    def _acquire_new(self, deadline: float) -> ProducerSession:
        with self._changed:
            self._waiting += 1
            try:
                while not self._closed:
                    with suppress(IndexError):
                        return self._idle.pop()
                    if self._open < self._size:
                        self._open += 1
                        break
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise Throttled(
                            f"all {self._size} connections are in use",
                            hint="raise `connections`, or make fewer calls at once",
                        )
                else:
                    raise client_closed()
            finally:
                self._waiting -= 1
        try:
            return ProducerSession(self.connect(deadline))
        except BaseException:
            self._count_closed()
            raise

    def _discard(self, session: ProducerSession) -> None:
        session.connection.close()
        if self._pid == os.getpid():
            self._count_closed()

    def _count_closed(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()

    def _after_fork(self) -> None:
        """Start anew in a child process.

        The sockets are the parent's, and a thread that is not here may hold the lock.
        """
        inherited = self._idle
        self._reset()
        for session in inherited:
            session.connection.close()
