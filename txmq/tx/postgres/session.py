"""Connections of txmq's own: each wait is bounded, and `pg_stat_activity` names them.

They are in autocommit mode. There psycopg2 adds no BEGIN, and statements sent as one
query string are one transaction that commits before the reply: several steps, one round
trip, no half-done state to clean up. Each statement of the string still gets a snapshot
of its own, which both the resolver and the inbox rely on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import psycopg2
from psycopg2 import extensions

from txmq.config.dsn import WRITE_IT_SO
from txmq.errors import DatabaseError, TransactionAborted
from txmq.tx.postgres.errors import translated

Connection: TypeAlias = extensions.connection
Cursor: TypeAlias = extensions.cursor

# A peer that vanished without a FIN is noticed within half a minute; PostgreSQL's own
# default is two hours.
SETTINGS: Final = {
    "connect_timeout": "5",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "target_session_attrs": "read-write",
}
# Each statement sees what was committed before it, whatever default a role or database
# has.
FRESH: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


def connect(
    dsn: str, *, application_name: str, cursor_factory: type[Cursor] | None = None
) -> Connection:
    """Connect to the server of `dsn`, which must take writes.

    Settings in `dsn` override those here. Raises DatabaseUnavailable, or DatabaseError
    where a retry is useless, as with an invalid DSN.
    """
    given = parsed_dsn(dsn)
    with translated("connecting to PostgreSQL"):
        connection: Connection = psycopg2.connect(
            **{**SETTINGS, "application_name": application_name, **given},
            cursor_factory=cursor_factory,
        )
    connection.autocommit = True
    return connection


def parsed_dsn(dsn: str) -> dict[str, Any]:
    """Return the settings of a DSN. Raises DatabaseError, which shows nothing of an
    invalid one: that may be a part of a password.
    """
    try:
        return dict(extensions.parse_dsn(dsn))
    except psycopg2.ProgrammingError:
        raise DatabaseError("the DSN cannot be read", hint=WRITE_IT_SO) from None


class OwnCursor(extensions.cursor):
    """A cursor of a connection of txmq's own. Its rows are tuples."""


def plain_cursor(connection: Connection) -> Cursor:
    """Return a cursor with rows that are tuples, whatever class the caller's cursors
    have.

    On a connection of txmq's own it is of the connection's class, which bounds
    statements. On one of psycopg 3, on which Django makes the tables, it is any.
    """
    if not isinstance(connection, extensions.connection):
        return connection.cursor()
    factory = connection.cursor_factory
    if isinstance(factory, type) and issubclass(factory, OwnCursor):
        return connection.cursor()
    # Not the method of a caller's class, which may have cursors of its own.
    return extensions.connection.cursor(connection, cursor_factory=extensions.cursor)


class Notices:
    """A block that collects the server's notices; they are in the connection's own
    list, too.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> list[str]:
        self._before = self._connection.notices
        self._connection.notices = self._found = list[str]()
        return self._found

    def __exit__(self, *_error: object) -> None:
        for notice in self._found:
            self._before.append(notice)  # psycopg2 takes anything that appends
        self._connection.notices = self._before


@contextmanager
def transaction(connection: Connection) -> Iterator[Cursor]:
    """Run a block in a transaction on one of txmq's own connections.

    Raises TransactionAborted where a failed statement's error was swallowed in the
    block.
    """
    with connection.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        try:
            yield cursor
        except BaseException:
            if (
                not connection.closed
                and connection.info.transaction_status != extensions.TRANSACTION_STATUS_IDLE
            ):
                cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")
        if cursor.statusmessage != "COMMIT":
            raise TransactionAborted(
                "the server rolled the transaction back: a statement in it had failed"
            )
