"""Bounds of the resolver's statements: for locks, on the server, and on the wire.

The server ends a statement that waits too long for a lock, or runs too long. What the
server itself does not end (a frozen backend, the wait of a COMMIT for a synchronous
standby) is cancelled after a while; if that does not help, the connection is cut. A cut
connection proves nothing about its last statement.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Event, Thread
from time import monotonic
from typing import Any, Final

from psycopg2 import Error, _psycopg, extensions
from psycopg2.sql import SQL, Composable

from txmq.tx.postgres.session import FRESH, OwnCursor

LOCK_MS: Final = 500  # unless a statement sets its own
STATEMENT_S: Final = 10.0
CANCELLED_WITHIN_S: Final = 2.0  # then the connection is cut
# In one query string with the statement, SET LOCAL ends with it: a pooler may give the
# server's connection to somebody else afterwards.
_LIMITS: Final = (
    f"{FRESH}; SET LOCAL lock_timeout = {LOCK_MS}; "
    f"SET LOCAL statement_timeout = {STATEMENT_S * 1000:.0f}; "
    "SET LOCAL row_security = off; "  # an error, where rows would be hidden in silence
)
# psycopg2's own `cancel` holds the interpreter's lock while it waits for the server: a
# frozen server would freeze this process. (Tried, psycopg2 2.9.13, 2026-11-22.)
_LIBPQ: Final = ctypes.CDLL(_psycopg.__file__)
_GET_CANCEL: Final = ctypes.PyDLL(_psycopg.__file__).PQgetCancel
_GET_CANCEL.restype, _GET_CANCEL.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
_LIBPQ.PQcancel.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
_LIBPQ.PQfreeCancel.argtypes = [ctypes.c_void_p]


class BoundedCursor(OwnCursor):
    """A cursor of a connection in autocommit mode, each of whose statements is
    bounded.
    """

    def execute(self, query: str | bytes | Composable, vars: Any = None) -> None:  # noqa: A002, ANN401  # psycopg2's
        """Execute a query string. A transaction keeps the limits of its BEGIN."""
        status = self.connection.info.transaction_status
        if status == extensions.TRANSACTION_STATUS_IDLE:
            query = _limited(query)
        with bounded(self.connection, STATEMENT_S + CANCELLED_WITHIN_S):
            super().execute(query, vars)


def _limited(query: str | bytes | Composable) -> str | bytes | Composable:
    if isinstance(query, Composable):
        return SQL(_LIMITS) + query
    return _LIMITS.encode() + query if isinstance(query, bytes) else _LIMITS + query


@contextmanager
def bounded(connection: extensions.connection, seconds: float) -> Iterator[None]:
    """Cancel what runs on `connection` after `seconds`, and cut the connection if that
    does not end it.

    `statement_timeout` is no substitute: it does not cover the wait of a COMMIT for a
    synchronous standby, and a frozen backend knows no time.
    """
    statement = _Statement(connection, monotonic() + seconds)
    _watch.add(statement)
    try:
        yield
    finally:
        _watch.remove(statement)


class _Statement:
    """A statement that runs until `over`, and should not after `deadline`."""

    def __init__(self, connection: extensions.connection, deadline: float) -> None:
        self.connection, self.deadline, self.over = connection, deadline, Event()

    def end(self) -> None:
        """Cancel the statement; cut the connection if that does not help."""
        # The thread may never return.
        Thread(target=_cancel, args=(self.connection, self.over), daemon=True).start()
        if not self.over.wait(CANCELLED_WITHIN_S):
            _cut(self.connection, self.over)


class _Watch:
    """One thread for all statements: to start one for each cost more than a short
    statement.

    The thread sleeps until the first deadline that it knows of. By then that statement
    has usually ended, so that it is seldom woken.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._running = set[_Statement]()
        self._wakes_at = float("inf")
        self._thread: Thread | None = None

    def add(self, statement: _Statement) -> None:
        with self._changed:
            self._running.add(statement)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="txmq bounds", daemon=True)
                self._thread.start()
            elif statement.deadline < self._wakes_at:
                self._changed.notify()

    def remove(self, statement: _Statement) -> None:
        statement.over.set()
        with self._changed:
            self._running.discard(statement)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = monotonic()
                late = {statement for statement in self._running if statement.deadline <= now}
                self._running -= late
                for statement in late:
                    Thread(target=statement.end, daemon=True).start()
                deadlines = [statement.deadline for statement in self._running]
                self._wakes_at = min(deadlines, default=float("inf"))
                self._changed.wait(self._wakes_at - now if deadlines else None)


_watch = _Watch()


def _forget_parent() -> None:
    """Begin anew in a child, which has none of the threads of its parent."""
    global _watch  # noqa: PLW0603  # one for the process
    _watch = _Watch()


os.register_at_fork(after_in_child=_forget_parent)


def _cancel(connection: extensions.connection, over: Event) -> None:
    with suppress(Error):  # closed meanwhile: nothing is left to cancel
        pointer = connection.pgconn_ptr
        # No other thread runs between this look and the next call's end, so that
        # nobody frees the connection.
        cancel = None if over.is_set() or not pointer else _GET_CANCEL(pointer)
        if cancel:
            _LIBPQ.PQcancel(cancel, ctypes.create_string_buffer(256), 256)
            _LIBPQ.PQfreeCancel(cancel)


def _cut(connection: extensions.connection, over: Event) -> None:
    """Shut the socket down, so that the call that waits for it fails."""
    with suppress(Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        if not over.is_set():  # else the number may be of another connection by now
            wire.shutdown(socket.SHUT_RDWR)
