"""Connections of asyncpg that take messages along with their COMMIT.

connection = await asyncpg.connect(dsn, connection_class=txmq.asyncpg.EnlistConnection)
async with connection.transaction():
client.enlist(connection).send("orders", body)
"""

from txmq.errors.extras import require

require("asyncpg", "asyncpg")

from txmq.tx.postgres.drivers.asyncpg_driver import EnlistConnection

__all__ = ["EnlistConnection"]
