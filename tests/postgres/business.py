"""A table of the business's own, and whether a connection is ready for the next
transaction on it.
"""

from __future__ import annotations

from psycopg2 import extensions

from tests.postgres.support import rows
from txmq.tx.postgres.caller import roll_back
from txmq.tx.postgres.session import Connection


def run(connection: Connection, statement: str) -> None:
    """Runs it in the connection's own transaction."""
    with connection.cursor() as cursor:
        cursor.execute(statement)


def business(dsn: str) -> list[tuple[object, ...]]:
    """What is committed."""
    return rows(dsn, "SELECT n FROM business ORDER BY n")


def assert_ready(connection: Connection, database: str) -> None:
    """The next statement begins a transaction of its own; it is not committed by
    itself.
    """
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    assert connection.status == extensions.STATUS_READY
    before = business(database)
    if connection.autocommit:
        run(connection, "BEGIN")
    run(connection, "INSERT INTO business VALUES (99)")
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_INTRANS
    assert business(database) == before
    roll_back(connection)
