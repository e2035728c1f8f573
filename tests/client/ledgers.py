"""Two databases and a broker for XA transactions, and their contents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

from tests.client.kept_sessions import asked
from tests.client.real import RealBroker
from tests.tx.postgres.business_table import run
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.xa import XaTransaction
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import commit_prepared, roll_back_prepared
from txmq.tx.postgres.prepared_list import list_prepared
from txmq.tx.postgres.session import connect as connect_to

TABLES = """
DROP TABLE IF EXISTS lines, orders;
CREATE TABLE orders (id text PRIMARY KEY);
CREATE TABLE lines (of text REFERENCES orders DEFERRABLE INITIALLY DEFERRED);
"""
_topics = count(1)


class Ledgers:
    """Databases with a connection each, the home broker, and its client.

    `connect` opens the connections, and so does `reset`.
    """

    def __init__(self, dsns: Sequence[str], broker: RealBroker, client: Client) -> None:
        self.dsns, self.broker, self.client = dsns, broker, client
        self.connections: list[Connection] = []
        self.topic = f"ledger-{next(_topics)}"
        self._earlier = self._all_undecided()

    @property
    def last(self) -> Connection:
        return self.connections[-1]

    def begin(self, order: str, client: Client | None = None, **options: Any) -> XaTransaction:
        """Begin a transaction, with a row in each database and a message."""
        tx = (client or self.client).xa(*self.connections, **options)
        tx.__enter__()
        self.write(order)
        tx.send(self.topic, order.encode(), key="k")
        return tx

    def write(self, order: str, *connections: Connection) -> None:
        """Write a row on these connections, by default on all."""
        for connection in connections or self.connections:
            run(connection, f"INSERT INTO orders VALUES ('{order}')")

    def rows(self) -> list[set[str]]:
        """Return the orders in each database."""
        return [{order for (order,) in asked(dsn, "SELECT id FROM orders")} for dsn in self.dsns]

    def messages(self) -> set[str]:
        """Return the published messages."""
        return {found.body.decode() for found in self.broker.read(self.topic)}

    def prepared(self) -> list[str]:
        """Return the gids of all branches that are prepared in the databases."""
        ask = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        return [gid for dsn in self.dsns for (gid,) in asked(dsn, ask)]

    def agree(self, *orders: str) -> bool:
        """Return whether these orders, and no others, exist everywhere, with nothing
        left over.
        """
        same = all(found == set(orders) for found in (*self.rows(), self.messages()))
        return same and not self.prepared() and not self.undecided()

    def undecided(self) -> set[str]:
        """Return the tokens of undecided transactions that no earlier test has left."""
        return self._all_undecided() - self._earlier

    def _all_undecided(self) -> set[str]:
        listed = self.client.call("tx.list", state="undecided", limit=10_000)
        return {one["token"] for one in listed["transactions"]}

    def state(self, tx: XaTransaction) -> str:
        """Return the home broker's decision."""
        asked = self.client.call(
            "xa.outcome", token=tx.token.hex, log_id=str(self.client.log_id), by="test"
        )
        return str(asked["state"])

    def recover(self) -> None:
        """End all prepared branches as the home broker decides, which has to decide
        now.
        """
        for row in self.client.call("xa.list", kind="home")["transactions"]:
            self.outcome(row["token"])
        for dsn in self.dsns:
            with closing(connect_to(dsn, application_name="recovery")) as connection:
                for one in list_prepared(connection):
                    if one.branch is None or not one.here:
                        continue
                    rolled_back = self.outcome(one.branch.token.hex) == "ROLLED_BACK"
                    end = roll_back_prepared if rolled_back else commit_prepared
                    end(connection, one.gid, one.xid)

    def outcome(self, token: str) -> str:
        """Return the home broker's decision, which has to decide now."""
        asked = {
            "token": token,
            "log_id": str(self.client.log_id),
            "decide": True,
            "by": "recovery",
        }
        return str(self.client.call("xa.outcome", **asked)["state"])

    def await_published(self, *orders: str) -> None:
        wait_until(lambda: self.messages() == set(orders), what=f"{orders} are published")

    def cut(self, number: int) -> None:
        """Terminate the backend of a connection."""
        pid = self.connections[number].info.backend_pid
        asked(self.dsns[number], f"SELECT pg_terminate_backend({pid}, 10000)")

    def reset(self) -> None:
        """Empty the tables, and open new connections."""
        self.close()
        for dsn in self.dsns:
            for (gid,) in asked(
                dsn, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ):
                asked(dsn, f"ROLLBACK PREPARED '{gid}'")
            asked(dsn, TABLES)
        self.connect()

    def connect(self) -> None:
        self.connections = [psycopg2.connect(dsn) for dsn in self.dsns]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
