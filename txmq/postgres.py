"""Connections of psycopg2 that take messages along with their COMMIT.

    made_by = txmq.postgres.EnlistConnection
    connection = psycopg2.connect(dsn, connection_factory=made_by)
    client.enlist(connection).send("orders", body)
    connection.commit()

A rollback drops rows and messages together.
"""

from txmq.tx.postgres.drivers.psycopg2_driver import EnlistConnection

__all__ = ["EnlistConnection"]
