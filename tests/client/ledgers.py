"""Two databases and a broker, for transactions over all of them; and what is found in
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.xa import XaTransaction
from txmq.testing.wait import wait_until
from txmq.tx.postgres.prepared import commit_prepared, roll_back_prepared
from txmq.tx.postgres.prepared_list import standing
from txmq.tx.postgres.session import connect as connect_to

TABLES = """
DROP TABLE IF EXISTS lines, orders;
CREATE TABLE orders (id text PRIMARY KEY);
CREATE TABLE lines (of text REFERENCES orders DEFERRABLE INITIALLY DEFERRED);
"""
DEADLINE_S = 20
_topics = count(1)


class Ledgers:
    """`dsns` are the databases, each with a connection; `broker` is the home broker,
    and `client` its client.
    """

    def __init__(self, dsns: Sequence[str], broker: RealBroker, client: Client) -> None:
        self.dsns, self.broker, self.client = dsns, broker, client
        self.connections: list[Connection] = [psycopg2.connect(dsn) for dsn in dsns]
        self.topic = f"ledger-{next(_topics)}"

    @property
    def last(self) -> Connection:
        return self.connections[-1]

    def begin(self, order: str, client: Client | None = None, **options: Any) -> XaTransaction:
        """A transaction that is about to end, with a row in each database and a
        message.
        """
        tx = (client or self.client).xa(*self.connections, **options)
        tx.__enter__()
        self.write(order)
        tx.send(self.topic, order.encode(), key="k")
        return tx

    def write(self, order: str, *connections: Connection) -> None:
        """A row on each of these connections; on all of them where none is named."""
        for connection in connections or self.connections:
            run(connection, f"INSERT INTO orders VALUES ('{order}')")

    def rows(self) -> list[set[str]]:
        """The orders in each database."""
        return [{order for (order,) in asked(dsn, "SELECT id FROM orders")} for dsn in self.dsns]

    def messages(self) -> set[str]:
        """What is published."""
        topics = {topic["name"] for topic in self.client.call("topic.list")["topics"]}
        found = self.broker.read(self.topic) if self.topic in topics else []
        return {one.body.decode() for one in found}

    def prepared(self) -> list[str]:
        """The gids that stand prepared in the databases, whoever's."""
        ask = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        return [gid for dsn in self.dsns for (gid,) in asked(dsn, ask)]

    def agree(self, *orders: str) -> bool:
        """Whether these orders, and no others, exist everywhere, and nothing is
        left.
        """
        same = all(found == set(orders) for found in (*self.rows(), self.messages()))
        return same and not self.prepared() and not self.undecided()

    def undecided(self) -> list[Any]:
        return list(self.client.call("tx.list", state="undecided")["transactions"])

    def state(self, tx: XaTransaction) -> str:
        """How the home broker has decided."""
        asked = self.client.call(
            "xa.outcome", token=tx.token.hex, log_id=str(self.client.log_id), by="test"
        )
        return str(asked["state"])

    def recover(self) -> None:
        """Ends whatever stands prepared as the home broker decides, which has to decide
        all that it is the home of.
        """
        for row in self.client.call("xa.list", kind="home")["transactions"]:
            self.outcome(row["token"])
        for dsn in self.dsns:
            with closing(connect_to(dsn, application_name="recovery")) as connection:
                for one in standing(connection):
                    if one.branch is None or not one.here:
                        continue
                    rolled_back = self.outcome(one.branch.token.hex) == "ROLLED_BACK"
                    end = roll_back_prepared if rolled_back else commit_prepared
                    end(connection, one.gid, one.xid)

    def outcome(self, token: str) -> str:
        """How the home broker has decided, now at the latest."""
        asked = {
            "token": token,
            "log_id": str(self.client.log_id),
            "decide": True,
            "by": "recovery",
        }
        return str(self.client.call("xa.outcome", **asked)["state"])

    def await_published(self, *orders: str) -> None:
        wait_until(
            lambda: self.messages() == set(orders), DEADLINE_S, what=f"{orders} are published"
        )

    def cut(self, number: int) -> None:
        """Ends the backend of a connection under its owner."""
        pid = self.connections[number].info.backend_pid
        asked(self.dsns[number], f"SELECT pg_terminate_backend({pid}, 10000)")

    def reset(self) -> None:
        """Empty tables, and new connections."""
        self.close()
        for dsn in self.dsns:
            for (gid,) in asked(
                dsn, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ):
                asked(dsn, f"ROLLBACK PREPARED '{gid}'")
            asked(dsn, TABLES)
        self.connections = [psycopg2.connect(dsn) for dsn in self.dsns]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def run(connection: Connection, statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def asked(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    """What a statement gives on a connection of its own."""
    with (
        closing(connect_to(dsn, application_name="test")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
        return [] if cursor.description is None else cursor.fetchall()
