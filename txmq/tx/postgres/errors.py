"""Translation of drivers' errors into txmq's, the only place of it.

An error is judged by its SQLSTATE, not by its class, because each driver has classes of
its own. Of an error of a statement only the SQLSTATE and the constraint are taken over:
the server's texts quote values of rows. An error without SQLSTATE never reached a row:
connections that could not be made or were lost, whose texts are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from txmq.errors import (
    DatabaseConflict,
    DatabaseError,
    DatabaseUnavailable,
    SchemaMissing,
    TransactionAborted,
)

SERIALIZATION_FAILURE: Final = "40001"
DEADLOCK_DETECTED: Final = "40P01"
LOCK_NOT_AVAILABLE: Final = "55P03"
CHECK_VIOLATION: Final = "23514"
UNIQUE_VIOLATION: Final = "23505"
QUERY_CANCELED: Final = "57014"
FAILED_TRANSACTION: Final = "25P02"  # a statement of it had failed before
NO_SAVEPOINT: Final = ("3B001", "25P01")  # no such one; no transaction is open at all
FAILED_EARLIER: Final = "a statement of the transaction failed earlier"
ROLL_BACK: Final = "roll back and begin again"
CONFLICTS: Final = frozenset({SERIALIZATION_FAILURE, DEADLOCK_DETECTED, LOCK_NOT_AVAILABLE})
# table, column, function, schema
NO_OBJECT: Final = frozenset({"42P01", "42703", "42883", "3F000"})
NOT_NOW: Final = ("08", "53", "57P")  # connection, resources, shutdown and start-up
AWAY: Final = (
    "check address, database, role and password; is the server up, and has it a connection left?"
)
MORE: Final = "PostgreSQL's own log tells more"
LINE: Final = 200  # characters
INSTALL: Final = "run `txmq schema install DSN`"
NO_SCHEMA: Final = "3F000"
MAKE_SCHEMA: Final = f"make the schema (CREATE SCHEMA); if it is that of txmq, {INSTALL}"
# prepared statements that are of another session, or are there already
POOLED: Final = (
    "behind a pooler that shares sessions connect with prepare_threshold=None (psycopg) or "
    "statement_cache_size=0 (asyncpg)"
)
HINTS: Final = {
    "25006": "this server is a standby, or the transaction is READ ONLY: write on the primary",
    "42501": "the role lacks a right on txmq's tables or functions (GRANT it), or row-level "
    "security is on: txmq schema check DSN tells which",
    "57014": "statement_timeout ended it, or somebody: the role or the DSN can have a longer one",
    "28000": "check the role and pg_hba.conf",
    "28P01": "check the password",
    "26000": POOLED,
    "42P05": POOLED,
}
DRIVERS: Final = ("psycopg2", "psycopg", "asyncpg")


class DriverError(Exception):
    """An error of a driver, in the words of the server.

    `severity` is that of the server's message, in English: "ERROR" leaves the session
    alive. Errors of the driver itself have neither SQLSTATE nor severity.
    """

    def __init__(
        self,
        original: BaseException,
        sqlstate: str | None = None,
        constraint: str | None = None,
        severity: str | None = None,
    ) -> None:
        super().__init__(str(original))
        self.original, self.sqlstate = original, sqlstate
        self.constraint, self.severity = constraint, severity


def driver_error(error: BaseException) -> DriverError | None:
    """Return what `error` says, if it is one of a driver."""
    if isinstance(error, DriverError):
        return error
    kind: Any = type(error)  # mypy takes no class for hashable
    driver = _driver_of(kind)
    if not driver:
        return None
    found: Any = error
    if driver == "asyncpg":
        return DriverError(
            error,
            getattr(error, "sqlstate", None),
            getattr(error, "constraint_name", None),
            getattr(error, "severity_en", None),
        )
    diagnostics = getattr(found, "diag", None)
    return DriverError(
        error,
        found.pgcode if driver == "psycopg2" else found.sqlstate,
        getattr(diagnostics, "constraint_name", None),
        getattr(diagnostics, "severity_nonlocalized", None),
    )


@lru_cache
def _driver_of(kind: Any) -> str:  # noqa: ANN401  # mypy takes no class for hashable
    """Return the driver that a class of errors belongs to, or nothing."""
    for base in kind.__mro__:
        if base.__name__ in _BASES and (root := base.__module__.partition(".")[0]) in DRIVERS:
            return str(root)
    return ""


_BASES: Final = ("Error", "PostgresError", "InterfaceError", "InternalClientError")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Translate drivers' errors of a block; their texts begin with `doing`.

    Raises TransactionAborted where a statement of the transaction had failed before.
    """
    try:
        yield
    except Exception as error:
        known = driver_error(error)
        if known is None:
            raise
        if known.sqlstate == FAILED_TRANSACTION:  # asyncpg's status does not show it
            raise TransactionAborted(FAILED_EARLIER, hint=ROLL_BACK) from None
        raise translate(known, doing) from None  # the original would print the rows it quotes


def translate(error: Exception, doing: str) -> DatabaseError:
    """Return the error of txmq for an error of a driver."""
    known = driver_error(error)
    state = None if known is None else known.sqlstate
    text = f"{doing}: {describe(error)}"
    if state in CONFLICTS:
        return DatabaseConflict(
            text, hint="roll back and run the transaction again", sqlstate=state
        )
    if state in NO_OBJECT:
        hint = MAKE_SCHEMA if state == NO_SCHEMA else INSTALL
        return SchemaMissing(text, hint=hint, sqlstate=state)
    if state is None or state.startswith(NOT_NOW):
        return DatabaseUnavailable(text, hint=AWAY, sqlstate=state)
    return DatabaseError(text, hint=HINTS.get(state, MORE), sqlstate=state)


def is_busy(error: DatabaseError) -> bool:
    """Return whether others were in the way of a statement; the server answers."""
    return isinstance(error, DatabaseConflict) or error.sqlstate == QUERY_CANCELED


def describe(error: Exception) -> str:
    """Return the part of `error` that may be shown: class, code and constraint, or its
    text.
    """
    known = driver_error(error) or DriverError(error)
    name, constraint = type(known.original).__name__, known.constraint
    if known.sqlstate is None:
        line = next(iter(str(known.original).splitlines()), "").strip()
        return f"{name}: {line[:LINE]}" if line else name
    return f"{name} {known.sqlstate}" + (f" ({constraint})" if constraint else "")
