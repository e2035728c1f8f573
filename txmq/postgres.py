"""Connections of psycopg2 that take messages along with their COMMIT."""

from txmq.tx.postgres.enlist import EnlistConnection

__all__ = ["EnlistConnection"]
