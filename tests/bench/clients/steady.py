"""Commit rows and messages at a fixed rate, past several rounds of autovacuum.

    python -m tests.bench.clients.steady URL DSN CLIENTS PER_S SECONDS

Prints p50 and p99 of the first and of the last sixth of the time, in µs, and how often
autovacuum has looked at the database's tables: {"first": …, "last": …, "vacuums": …,
"late": …}. Each transaction updates one of few rows and adds one. The times count from
when a transaction was due; `late` is the share that began more than a second late.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from typing import NamedTuple

import psycopg2

import txmq
from tests.bench.clients.transactions import BODY, meet, ready
from tests.bench.raw.latency import latency_us

ACCOUNTS = 100
CREATE = (
    "CREATE TABLE bench_steady (id serial PRIMARY KEY, n int NOT NULL DEFAULT 0)",
    f"INSERT INTO bench_steady SELECT FROM generate_series(1, {ACCOUNTS})",
)
DROP = "DROP TABLE IF EXISTS bench_steady"
UPDATE = "UPDATE bench_steady SET n = n + 1 WHERE id = %s"
INSERT = "INSERT INTO bench_steady DEFAULT VALUES"
FREQUENT = (
    "ALTER SYSTEM SET autovacuum = on",
    "ALTER SYSTEM SET autovacuum_naptime = '1s'",
    "ALTER SYSTEM SET autovacuum_vacuum_threshold = 500",
    "ALTER SYSTEM SET autovacuum_vacuum_scale_factor = 0",
)
AS_IT_WAS = tuple(f"ALTER SYSTEM RESET {one.split()[3]}" for one in FREQUENT)
RELOAD = "SELECT pg_reload_conf()"
VACUUMS = "SELECT sum(autovacuum_count) FROM pg_stat_all_tables"


class Took(NamedTuple):
    """A transaction: when it was due, when it began and ended, in s since the start."""

    due: float
    began: float
    ended: float


def client(url: str, dsn: str, first: float, pause: float, seconds: float) -> list[Took]:
    """Begin a transaction at `first` seconds and then every `pause` seconds."""
    took = list[Took]()
    with closing(psycopg2.connect(dsn)) as connection, txmq.connect(url) as client:
        client.send("bench", BODY)
        with client.transaction(connection) as transaction:  # requests that are made once only
            transaction.send("bench", BODY)
        ready()
        start, due = time.monotonic(), first
        while due < seconds:
            time.sleep(max(0.0, start + due - time.monotonic()))
            began = time.monotonic() - start
            with client.transaction(connection) as transaction, connection.cursor() as cursor:
                cursor.execute(UPDATE, (len(took) % ACCOUNTS + 1,))
                cursor.execute(INSERT)
                transaction.send("bench", BODY)
            took.append(Took(due, began, time.monotonic() - start))
            due += pause
    return took


def run(dsn: str, *statements: str) -> None:
    """Execute the statements, each on its own: ALTER SYSTEM refuses a transaction."""
    with closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)


def vacuums(dsn: str) -> int:
    """Return how often autovacuum has ended."""
    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute(VACUUMS)
        found = cursor.fetchone()
        return int(found[0]) if found is not None else 0


def main(url: str, dsn: str, clients: int, per_s: float, seconds: float) -> None:
    """Measure and print."""
    run(dsn, *FREQUENT, RELOAD, DROP, *CREATE)
    try:
        before, pause = vacuums(dsn), clients / per_s
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(clients, context, meet, (context.Barrier(clients),)) as executor:
            futures = [
                executor.submit(client, url, dsn, n / per_s, pause, seconds) for n in range(clients)
            ]
            took = [one for future in futures for one in future.result()]
        sixth = seconds / 6
        first = [one.ended - one.due for one in took if one.due < sixth]
        last = [one.ended - one.due for one in took if one.due >= seconds - sixth]
        late = sum(one.began - one.due > 1.0 for one in took) / len(took)
        found = {
            "first": latency_us(first),
            "last": latency_us(last),
            "vacuums": vacuums(dsn) - before,
            "late": late,
        }
    finally:
        run(dsn, *AS_IT_WAS, RELOAD, DROP)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
