"""A database with a table of orders, a broker that may ask it, and their contents."""

from __future__ import annotations

from itertools import count
from typing import Any

import psycopg2

from tests.client.kept_sessions import asked
from tests.client.real import Found, RealBroker
from txmq.client.blocking.client import Client
from txmq.errors import ConnectionLost

TABLES = """
DROP TABLE IF EXISTS lines, orders;
CREATE TABLE orders (id text PRIMARY KEY, paid boolean NOT NULL DEFAULT false);
CREATE TABLE lines (id int, of text REFERENCES orders DEFERRABLE INITIALLY DEFERRED);
"""
_topics = count(1)


class ApplicationError(Exception):
    """An error of the user's code."""


def fail() -> None:
    raise ApplicationError


class World:
    """A database with a table of orders, the broker that may ask it, and a client."""

    def __init__(self, dsn: str, broker: RealBroker, client: Client) -> None:
        self.dsn, self.broker, self.client = dsn, broker, client
        self.connection = psycopg2.connect(dsn)
        self.topic = f"orders-{next(_topics)}"

    def insert(self, order: str, connection: Any = None) -> None:
        with (connection or self.connection).cursor() as cursor:
            cursor.execute("INSERT INTO orders (id) VALUES (%s)", (order,))

    def orders(self) -> set[str]:
        return {order for (order,) in asked(self.dsn, "SELECT id FROM orders")}

    def messages(self) -> set[str]:
        """Return the published messages; they agree with the rows once all is
        decided.
        """
        return {found.body.decode() for found in self.stored()}

    def stored(self) -> list[Found]:
        """Return the published messages by partition and offset."""
        return self.broker.read(self.topic)

    def settled(self) -> bool:
        """Return whether every transaction is decided, as far as the broker tells."""
        try:
            return not self.client.call("tx.list", state="undecided")["transactions"]
        except ConnectionLost:  # a transaction has held it while the broker was killed
            return False

    def state(self, token: Any) -> str:
        return str(self.client.call("tx.show", token=token.hex)["state"])


def make_tables(dsn: str) -> None:
    """Create the tables anew, empty."""
    asked(dsn, TABLES)
