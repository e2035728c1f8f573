"""Connections of asyncpg that take messages along with their COMMIT.

    made_by = txmq.asyncpg.EnlistConnection
    connection = await asyncpg.connect(dsn, connection_class=made_by)
    async with connection.transaction():
        client.enlist(connection).send("orders", body)

A pool takes the same `connection_class`; the client is one of `txmq.aio`.
"""

from txmq.errors.extras import require

require("asyncpg", "asyncpg")

from txmq.tx.postgres.drivers.asyncpg_driver import EnlistConnection

__all__ = ["EnlistConnection"]
