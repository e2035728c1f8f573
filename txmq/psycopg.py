"""Connections of psycopg 3 that take messages along with their COMMIT.

    connection = txmq.psycopg.EnlistConnection.connect(dsn)
    client.enlist(connection).send("orders", body)
    connection.commit()     # as well: the end of `with connection.transaction():`

Clients of `txmq.aio` take an `AsyncEnlistConnection`.
"""

from txmq.errors.extras import require

require("psycopg", "psycopg")

from txmq.tx.postgres.drivers.psycopg_driver import AsyncEnlistConnection, EnlistConnection

__all__ = ["AsyncEnlistConnection", "EnlistConnection"]
