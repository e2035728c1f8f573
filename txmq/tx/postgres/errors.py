"""Translation of psycopg2's errors into txmq's, the only place of it.

Of an error of a statement only the SQLSTATE and the constraint are taken over, because
the server's texts quote values of rows. An error without SQLSTATE never reached a row:
connections that could not be made or were lost, whose texts are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg2

from txmq.errors import DatabaseConflict, DatabaseError, DatabaseUnavailable, SchemaMissing

SERIALIZATION_FAILURE: Final = "40001"
DEADLOCK_DETECTED: Final = "40P01"
LOCK_NOT_AVAILABLE: Final = "55P03"
CHECK_VIOLATION: Final = "23514"
UNIQUE_VIOLATION: Final = "23505"
QUERY_CANCELED: Final = "57014"
CONFLICTS: Final = frozenset({SERIALIZATION_FAILURE, DEADLOCK_DETECTED, LOCK_NOT_AVAILABLE})
# table, column, function, schema
NO_OBJECT: Final = frozenset({"42P01", "42703", "42883", "3F000"})
NOT_NOW: Final = ("08", "53", "57P")  # connection, resources, shutdown and start-up
AWAY: Final = "is the server up, its address right, and a connection to be had?"
MORE: Final = "PostgreSQL's own log tells more"
LINE: Final = 200  # characters
INSTALL: Final = "run `txmq schema install DSN`"
HINTS: Final = {
    "25006": "this server is a standby or read-only: use the primary",
    "42501": "the role lacks a right on txmq's tables: GRANT it, or let their owner run this",
    "28000": "check the role and pg_hba.conf",
    "28P01": "check the password",
}


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Translate psycopg2's errors of a block; their texts begin with `doing`."""
    try:
        yield
    except psycopg2.Error as error:
        raise translate(error, doing) from None  # the original would print the rows it quotes


def translate(error: psycopg2.Error, doing: str) -> DatabaseError:
    """Return the error of txmq for `error`."""
    state = error.pgcode
    text = f"{doing}: {describe(error)}"
    if state in CONFLICTS:
        return DatabaseConflict(
            text, hint="roll back and run the transaction again", sqlstate=state
        )
    if state in NO_OBJECT:
        return SchemaMissing(text, hint=INSTALL, sqlstate=state)
    if state is None or state.startswith(NOT_NOW):
        return DatabaseUnavailable(text, hint=AWAY, sqlstate=state)
    return DatabaseError(text, hint=HINTS.get(state, MORE), sqlstate=state)


def is_busy(error: DatabaseError) -> bool:
    """Return whether others were in the way of a statement; the server answers."""
    return isinstance(error, DatabaseConflict) or error.sqlstate == QUERY_CANCELED


def describe(error: psycopg2.Error) -> str:
    """Return the part of `error` that may be shown: class, code and constraint, or its
    text.
    """
    name, constraint = type(error).__name__, error.diag.constraint_name
    if error.pgcode is None:
        line = next(iter(str(error).splitlines()), "").strip()
        return f"{name}: {line[:LINE]}" if line else name
    return f"{name} {error.pgcode}" + (f" ({constraint})" if constraint else "")
