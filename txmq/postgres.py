"""Connections of psycopg2 that take messages along with their COMMIT."""

from txmq.tx.postgres.drivers.psycopg2_driver import EnlistConnection

__all__ = ["EnlistConnection"]
