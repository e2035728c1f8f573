"""Yardstick: insert and commit one row, repeatedly, by several clients.

    python -m tests.bench.raw.plain_commit DSN CLIENTS SECONDS threads|processes

Prints {"per_s", "p50_us", "p99_us"} of INSERT and COMMIT together.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing

import psycopg2

from tests.bench.raw.latency import latency_us

COLUMNS = "id bigserial PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL"
CREATE = f"CREATE TABLE bench_orders ({COLUMNS})"
INSERT = "INSERT INTO bench_orders (customer, cents) VALUES ('c-1', 1999)"
DROP = "DROP TABLE IF EXISTS bench_orders"


def run(dsn: str, *statements: str) -> None:
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def client(dsn: str, seconds: float) -> list[float]:
    """Return the times of the commits that began within `seconds` of the start."""
    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        ready.wait()
        took, start = [], time.monotonic()
        began = start
        while began < start + seconds:
            cursor.execute(INSERT)
            connection.commit()
            took.append(time.monotonic() - began)
            began = time.monotonic()
        return took


def main(dsn: str, clients: int, seconds: float, executor: Executor) -> None:
    run(dsn, DROP, CREATE)
    with executor:
        futures = [executor.submit(client, dsn, seconds) for _ in range(clients)]
        took = [one for future in futures for one in future.result()]
    run(dsn, DROP)
    print(json.dumps({"per_s": len(took) / seconds, **latency_us(took)}))


if __name__ == "__main__":
    count, fork = int(sys.argv[2]), multiprocessing.get_context("fork")
    ready, threads = fork.Barrier(count), sys.argv[4] == "threads"
    pool = ThreadPoolExecutor(count) if threads else ProcessPoolExecutor(count, fork)
    main(sys.argv[1], count, float(sys.argv[3]), pool)
