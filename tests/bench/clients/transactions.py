"""Commit one row and one message per transaction, in several processes.

    python -m tests.bench.clients.transactions URL DSN CLIENTS SECONDS

Prints {"per_s", "p50_us", "p99_us"}. The row is that of `tests.bench.raw.plain_commit`.
The database must have the schema of txmq.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing.synchronize import Barrier

import psycopg2

import txmq
from tests.bench.raw.latency import latency_us
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run

BODY = bytes(256)
READY_WITHIN_S = 60.0
_all_ready: Barrier


def meet(barrier: Barrier) -> None:
    """Set the barrier at which all processes wait."""
    global _all_ready  # noqa: PLW0603  # a barrier is inherited
    _all_ready = barrier


def ready() -> None:
    """Wait for all other processes."""
    _all_ready.wait(READY_WITHIN_S)


def client(url: str, dsn: str, seconds: float) -> list[float]:
    """Return the times of the transactions that began within `seconds` of the start."""
    with closing(psycopg2.connect(dsn)) as connection, txmq.connect(url) as client:
        client.send("bench", BODY)
        with client.transaction(connection) as transaction:  # requests that are made once only
            transaction.send("bench", BODY)
        ready()
        start = time.monotonic()
        took, began = [], start
        while began < start + seconds:
            with client.transaction(connection) as transaction, connection.cursor() as cursor:
                cursor.execute(INSERT)
                transaction.send("bench", BODY)
            took.append(time.monotonic() - began)
            began = time.monotonic()
        return took


def main(url: str, dsn: str, clients: int, seconds: float) -> None:
    """Measure and print."""
    run(dsn, DROP, CREATE)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(clients, context, meet, (context.Barrier(clients),)) as executor:
        futures = [executor.submit(client, url, dsn, seconds) for _ in range(clients)]
        took = [one for future in futures for one in future.result()]
    run(dsn, DROP)
    print(json.dumps({"per_s": len(took) / seconds, **latency_us(took)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
