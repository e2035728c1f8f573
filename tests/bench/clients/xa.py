"""Commit a row in each of two databases and a message per XA transaction, in several
threads.

    python -m tests.bench.clients.xa URL DSN OTHER_DSN THREADS SECONDS

Prints {"per_s", "p50_us", "p99_us"}. The rows are those of `tests.bench.raw.two_phase`.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import psycopg2

import txmq
from tests.bench.raw.latency import latency_us
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run
from txmq.client.blocking.client import Client

BODY = bytes(256)


def work(client: Client, dsns: list[str], ready: Barrier, seconds: float) -> list[float]:
    """Return the times of the transactions that began within `seconds` of the start."""
    connections = [psycopg2.connect(dsn) for dsn in dsns]
    with client.xa(*connections) as transaction:  # requests that are made once only
        transaction.send("bench", BODY)
    ready.wait()
    start = began = time.monotonic()
    took: list[float] = []
    while began < start + seconds:
        with client.xa(*connections) as transaction:
            for connection in connections:
                with connection.cursor() as cursor:
                    cursor.execute(INSERT)
            transaction.send("bench", BODY)
        took.append(time.monotonic() - began)
        began = time.monotonic()
    for connection in connections:
        connection.close()
    return took


def main(url: str, dsns: list[str], threads: int, seconds: float) -> None:
    """Measure and print."""
    for dsn in dsns:
        run(dsn, DROP, CREATE)
    ready = Barrier(threads)
    with txmq.connect(url) as client, ThreadPoolExecutor(threads) as executor:
        futures = [executor.submit(work, client, dsns, ready, seconds) for _ in range(threads)]
        took = [one for future in futures for one in future.result()]
    for dsn in dsns:
        run(dsn, DROP)
    print(json.dumps({"per_s": len(took) / seconds, **latency_us(took)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:4], int(sys.argv[4]), float(sys.argv[5]))
