"""Count what a message costs a business transaction, by the way that it goes.

    python -m tests.bench.clients.joined URL DSN TRANSACTIONS

Prints, for each way, {"trips", "wal_bytes", "per_s"} for one transaction of one row:
alone, with a message by `client.transaction` and by `client.enlist`, and with a row of
an outbox, which is deleted in a hundred at once. The database must have the schema of
txmq.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg2

import txmq
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run
from tests.bench.relayed_database import relayed
from txmq.postgres import EnlistConnection

BODY = bytes(256)
OUTBOX = "CREATE TABLE bench_joined (id bigserial PRIMARY KEY, key text, body bytea NOT NULL)"
DELETED_AT_ONCE = 100
Transact = Callable[[txmq.Client, Any], None]


def plain(_client: txmq.Client, connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(INSERT)
    connection.commit()


def block(client: txmq.Client, connection: Any) -> None:
    with client.transaction(connection) as tx, connection.cursor() as cursor:
        cursor.execute(INSERT)
        tx.send("bench", BODY)


def enlisted(client: txmq.Client, connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(INSERT)
    client.enlist(connection).send("bench", BODY)
    connection.commit()


def outbox(_client: txmq.Client, connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(INSERT)
        cursor.execute("INSERT INTO bench_joined (body) VALUES (%s)", (BODY,))
    connection.commit()


WAYS: dict[str, Transact] = {
    "plain": plain,
    "transaction": block,
    "enlist": enlisted,
    "outbox": outbox,
}


def written(cursor: Any) -> int:
    """Return the position of the write-ahead log in bytes."""
    cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
    return int(cursor.fetchone()[0])


def measure(url: str, dsn: str, way: str, transactions: int) -> dict[str, float]:
    """Return the figures of one way."""
    with (
        closing(psycopg2.connect(dsn)) as watch,
        txmq.connect(url) as client,
        relayed(dsn) as (counted, sent),
        closing(psycopg2.connect(counted, connection_factory=EnlistConnection)) as connection,
    ):
        watch.autocommit = True
        for _ in range(10):  # requests that are made once only
            WAYS[way](client, connection)
        with watch.cursor() as cursor:
            cursor.execute("CHECKPOINT")  # images of pages come once, before the count
            for _ in range(10):
                WAYS[way](client, connection)
            before, trips, start = written(cursor), sent.trips, time.monotonic()
            for _ in range(transactions):
                WAYS[way](client, connection)
            took, trips = time.monotonic() - start, sent.trips - trips
            if way == "outbox":
                for _ in range(0, transactions, DELETED_AT_ONCE):
                    cursor.execute(
                        "DELETE FROM bench_joined WHERE id IN "
                        "(SELECT id FROM bench_joined ORDER BY id LIMIT %s)",
                        (DELETED_AT_ONCE,),
                    )
            client.flush()
            wal = written(cursor) - before
    return {
        "trips": trips / transactions,
        "wal_bytes": wal / transactions,
        "per_s": transactions / took,
    }


def main(url: str, dsn: str, transactions: int) -> None:
    """Measure and print."""
    run(dsn, DROP, CREATE, "DROP TABLE IF EXISTS bench_joined", OUTBOX)
    found = {way: measure(url, dsn, way, transactions) for way in WAYS}
    run(dsn, DROP, "DROP TABLE bench_joined")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
