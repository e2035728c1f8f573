"""The business connection that a caller lends for one transaction: whether it is fit, how it begins and is undone."""

from __future__ import annotations

from contextlib import suppress

import psycopg2
from psycopg2 import extensions

from txmq.errors import DatabaseUnavailable, LocalProtocolError, TransactionAborted
from txmq.tx.postgres.session import Connection
from txmq.tx.postgres.translate import translated


def begin(connection: Connection) -> None:
    """Makes sure that statements from here on are one transaction.

    Raises LocalProtocolError for what is no connection of psycopg2, DatabaseUnavailable or TransactionAborted where the
    connection is lost, or in the middle of a failed transaction.
    """
    if not isinstance(connection, extensions.connection):
        hint = "with SQLAlchemy: session.connection().connection.dbapi_connection"
        raise LocalProtocolError(f"a psycopg2 connection is needed, not a {type(connection).__name__}", hint=hint)
    status = connection.info.transaction_status
    if connection.closed or status == extensions.TRANSACTION_STATUS_UNKNOWN:
        raise DatabaseUnavailable("the connection is closed", hint="open another one")
    require_healthy(connection)
    if connection.autocommit and status == extensions.TRANSACTION_STATUS_IDLE:
        execute(connection, "BEGIN")


def require_healthy(connection: Connection) -> None:
    """Raises TransactionAborted where a statement of the transaction has failed, whatever became of its error."""
    if connection.info.transaction_status == extensions.TRANSACTION_STATUS_INERROR:
        raise TransactionAborted("a statement of the transaction failed earlier", hint="roll back and begin again")


def is_idle(connection: Connection) -> bool:
    """Whether no transaction is open."""
    return bool(connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE)


def execute(connection: Connection, statement: str) -> None:
    """Runs one statement. Raises DatabaseError."""
    with translated(statement), connection.cursor() as cursor:
        cursor.execute(statement)


def roll_back(connection: Connection) -> None:
    """Ends the open transaction; if the connection is lost, the server ends it by itself."""
    with suppress(psycopg2.Error):
        end(connection)


def end(connection: Connection) -> None:
    """Brings server and psycopg2 to where no transaction is open: ROLLBACK, if need be. Raises psycopg2.Error."""
    if connection.autocommit:
        if not is_idle(connection):
            with connection.cursor() as cursor:
                cursor.execute("ROLLBACK")
        return
    try:
        connection.rollback()
    except psycopg2.ProgrammingError:  # begun by tpc_begin, which forbids it; nothing was sent
        connection.tpc_rollback()
