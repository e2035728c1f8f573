"""Connections to share between threads: each call borrows an idle one, or opens
another.

Each is a producing session of its own, whose sequence has no gaps because only one
thread sends on it at a time.
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
from txmq.errors import ClientClosed, Throttled

# a connection idle for longer is looked at before it is used; no broker ends and is
# back sooner
FRESH_S = 0.05


class Session:
    """A producing session: its id, the sequence of its next message, and the connection
    it sends on for now.
    """

    __slots__ = ("connection", "idle_since", "prefix", "producer_id", "sequence")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.idle_since = 0.0
        self.retire()

    def retire(self) -> None:
        """Begins a new producing session: what became of the last send of the old one
        is not known, and stays so.
        """
        self.producer_id = uuid4().bytes
        self.prefix = f"{self.producer_id.hex()}-"  # of its message ids
        self.sequence = 0


class Pool:
    """Sessions, at most `size` of them. `dial` opens a connection before a deadline, or
    raises.
    """

    def __init__(self, dial: Callable[[float], Connection], size: int) -> None:
        self.dial = dial
        self._size = size
        self._start()
        self._closed = False

    def _start(self) -> None:
        self._idle: deque[Session] = deque()
        self._changed = Condition()
        self._waiting = 0
        self._open = 0
        self._pid = os.getpid()

    def take(self, deadline: float) -> Session:
        """A session with a connection. Raises BrokerUnavailable, Throttled where all
        stay in use, ClientClosed.
        """
        if self._pid != os.getpid():
            self._forked()
        while not self._closed:
            try:
                session = (
                    self._idle.pop()
                )  # without the lock: a deque's pop is one step, and the last used is warmest
            except IndexError:
                return self._another(deadline)
            if time.monotonic() - session.idle_since < FRESH_S or not session.connection.is_stale():
                return session
            self._discard(session)
        raise closed()

    def spare(self) -> Session | None:
        """A session that lies idle and was used just now; None = there is none."""
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

    def reclaim(self, session: Session) -> bool:
        """Takes that very session, unless somebody else has it; whether it was
        there.
        """
        try:
            self._idle.remove(session)
        except ValueError:
            return False
        return True

    def catch_up(self) -> None:
        """Reads the replies that have come on idle connections; those that are gone
        make room for others.
        """
        for session in list(self._idle):
            if self.reclaim(session):
                session.connection.catch_up()
                self.give(session)

    def give(self, session: Session) -> None:
        """Puts a session back; one whose connection is gone makes room for another."""
        if session.connection.closed or self._closed or self._pid != os.getpid():
            self._discard(session)
            return
        session.idle_since = time.monotonic()
        self._idle.append(session)
        if self._waiting:
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        """Closes idle connections now, those in use when they are given back."""
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        while self._idle:
            self._discard(self._idle.pop())

    def _another(self, deadline: float) -> Session:
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
                        hint = "raise `connections`, or make fewer calls at once"
                        raise Throttled(f"all {self._size} connections are in use", hint=hint)
                else:
                    raise closed()
            finally:
                self._waiting -= 1
        return self._dialled(deadline)

    def _dialled(self, deadline: float) -> Session:
        try:
            return Session(self.dial(deadline))
        except BaseException:
            self._one_less()
            raise

    def _discard(self, session: Session) -> None:
        session.connection.close()
        if self._pid == os.getpid():
            self._one_less()

    def _one_less(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()

    def _forked(self) -> None:
        """In a child process: the sockets are the parent's, and a lock may be held by a
        thread that is not here.
        """
        theirs = self._idle
        self._start()
        for session in theirs:
            session.connection.close()


def closed() -> ClientClosed:
    """The error for every call after `close`."""
    return ClientClosed("the client was closed", hint="make a new one with txmq.connect")
