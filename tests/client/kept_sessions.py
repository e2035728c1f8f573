"""Sessions that look at databases for tests, and are kept for the next look.

To connect costs 5 ms of processor time, many times what the statements do.
"""

from __future__ import annotations

from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

from txmq.tx.postgres.session import connect

_kept: dict[str, Connection] = {}


def asked(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, or nothing; outside a transaction."""
    kept = _kept.pop(dsn, None)
    if kept is not None:
        try:
            return _run(kept, dsn, statement)
        except (psycopg2.OperationalError, psycopg2.InterfaceError):
            kept.close()  # its server was killed, or its backend, since the last look
    return _run(connect(dsn, application_name="test"), dsn, statement)


def _run(connection: Connection, dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        rows = [] if cursor.description is None else cursor.fetchall()
    _kept[dsn] = connection
    return rows
