"""A table of the application, and a check that a connection can be used again."""

from __future__ import annotations

from typing import Any

from psycopg2 import extensions

from tests.tx.postgres.support import rows
from txmq.tx.postgres.blocking import roll_back
from txmq.tx.postgres.session import Connection


def run(connection: Any, *statements: str) -> None:
    """Run statements in the connection's own transaction."""
    for statement in statements:
        with connection.cursor() as cursor:
            cursor.execute(statement)


def business_rows(dsn: str) -> list[tuple[object, ...]]:
    """Return the committed rows."""
    return rows(dsn, "SELECT n FROM business ORDER BY n")


def assert_ready(connection: Connection, database: str) -> None:
    """Check that the next statement begins a transaction, and does not commit by
    itself.
    """
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    assert connection.status == extensions.STATUS_READY
    before = business_rows(database)
    if connection.autocommit:
        run(connection, "BEGIN")
    run(connection, "INSERT INTO business VALUES (99)")
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_INTRANS
    assert business_rows(database) == before
    roll_back(connection)
