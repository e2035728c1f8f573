"""Committed transactions whose rows a database has lost are named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest

from tests.cli.test_xa import txmq
from tests.client.real import RealBroker
from tests.tx.postgres.support import producer, rows
from txmq.client.blocking.client import Client
from txmq.client.blocking.connect import connect
from txmq.recover import lost_commits
from txmq.recover.lost_commits import find_lost
from txmq.tx.postgres.session import connect as connect_database

NEVER = UUID(int=0)


@pytest.fixture
def broker(tmp_path: Path, database: str) -> Iterator[RealBroker]:
    running = RealBroker(tmp_path, [database])
    yield running
    running.stop()


def committed(client: Client, dsn: str, number: int) -> str:
    """Commit a row and a message; return the token."""
    with closing(producer(dsn)) as connection, client.transaction(connection) as tx:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s)", (number,))
        tx.send("orders", b"x")
    tx.wait_published()
    return tx.token.hex


def test_transactions_whose_rows_are_lost_are_named(
    broker: RealBroker, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_commits, "PAGE_SIZE", 2)
    rows(database, "CREATE TABLE orders (n int)")
    with (
        connect(broker.url, service="shop") as client,
        closing(connect_database(database, application_name="test")) as connection,
    ):
        tokens = [committed(client, database, number) for number in range(5)]
        report = find_lost(client, connection, NEVER)
        assert (report.lost, report.compared) == ((), 5)
        assert report.since > NEVER, "no rows are kept of earlier days"
        # as after a failover to an asynchronous standby
        gone = "DELETE FROM orders WHERE n > 2; DELETE FROM txmq_token WHERE tok >= %s::uuid"
        rows(database, gone, tokens[3])
        report = find_lost(client, connection, NEVER)
        assert ([row["token"] for row in report.lost], report.compared) == (tokens[3:], 5)
    status, output = txmq("tx", "lost", database, "--broker", broker.url)
    assert (status, output["compared"]) == (1, 5)
    assert [(row["token"], row["service"]) for row in output["transactions"]] == [
        (token, "shop") for token in tokens[3:]
    ]
