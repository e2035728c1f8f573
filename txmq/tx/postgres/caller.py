"""Checks and steps on the business connection that a caller lends for one
transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import psycopg2
from psycopg2 import extensions

from txmq.errors import DatabaseError, DatabaseUnavailable, LocalProtocolError, TransactionAborted
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection, plain_cursor

_savepoints = count(1)


def require_usable(connection: Connection) -> None:
    """Require a psycopg2 connection that can run statements.

    Raises LocalProtocolError for other objects, DatabaseUnavailable for a lost
    connection, TransactionAborted in the middle of a failed transaction.
    """
    if not isinstance(connection, extensions.connection):
        hint = "with SQLAlchemy: session.connection().connection.dbapi_connection"
        raise LocalProtocolError(
            f"a psycopg2 connection is needed, not a {type(connection).__name__}", hint=hint
        )
    if connection.async_:
        raise LocalProtocolError(
            "the psycopg2 connection is asynchronous",
            hint="open one without async_=True; on Twisted the client runs it in its threads",
        )
    unknown = connection.get_transaction_status() == extensions.TRANSACTION_STATUS_UNKNOWN
    if connection.closed or unknown:
        raise DatabaseUnavailable("the connection is closed", hint="open another one")
    require_healthy(connection)


def require_healthy(connection: Connection) -> None:
    """Require a transaction without a failed statement, even if its error was
    swallowed.

    Raises TransactionAborted.
    """
    if connection.get_transaction_status() == extensions.TRANSACTION_STATUS_INERROR:
        raise TransactionAborted(
            "a statement of the transaction failed earlier", hint="roll back and begin again"
        )


def require_open(connection: Connection) -> None:
    """Require an open transaction, which the next statement will join.

    Without one the statement would be committed alone. Raises LocalProtocolError, or
    TransactionAborted where a statement of the transaction has failed.
    """
    status = connection.get_transaction_status()
    if status == extensions.TRANSACTION_STATUS_INERROR:
        raise TransactionAborted("a statement of the transaction failed earlier", hint="roll back")
    begins_by_itself = not connection.autocommit and connection.status == extensions.STATUS_READY
    if status != extensions.TRANSACTION_STATUS_INTRANS and not begins_by_itself:
        raise LocalProtocolError(
            "no transaction is open", hint="nobody may commit or roll back inside the block"
        )


def is_idle(connection: Connection) -> bool:
    """Return whether no transaction is open."""
    return bool(connection.get_transaction_status() == extensions.TRANSACTION_STATUS_IDLE)


def execute(connection: Connection, statement: str) -> None:
    """Run one statement. Raises DatabaseError."""
    with translated(statement), connection.cursor() as cursor:
        cursor.execute(statement)


@contextmanager
def savepoint(connection: Connection) -> Iterator[None]:
    """Run a block whose rows are rolled back where it raises. Raises DatabaseError."""
    name = f"txmq_{next(_savepoints)}"
    execute(connection, f"SAVEPOINT {name}")
    try:
        yield
    except BaseException:
        with suppress(DatabaseError):  # lost: then the whole transaction is gone
            execute(connection, f"ROLLBACK TO SAVEPOINT {name}")
        raise
    execute(connection, f"RELEASE SAVEPOINT {name}")


def roll_back(connection: Connection) -> None:
    """Roll back the open transaction; the server ends that of a lost connection
    itself.
    """
    with suppress(psycopg2.Error):
        end(connection)


def end(connection: Connection) -> None:
    """Leave server and psycopg2 without an open transaction. Raises psycopg2.Error."""
    if connection.autocommit:
        if not is_idle(connection):
            with plain_cursor(connection) as cursor:
                cursor.execute("ROLLBACK")
        return
    try:
        connection.rollback()
    except psycopg2.ProgrammingError:  # begun by tpc_begin, which forbids it; nothing was sent
        if connection.status == extensions.STATUS_READY:
            # psycopg2 2.9 stays in two-phase mode after a failed tpc_commit().
            connection.tpc_begin("to leave the mode")
        connection.tpc_rollback()
