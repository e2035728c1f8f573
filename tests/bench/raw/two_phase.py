"""Yardstick: commit a row in each of two databases in two phases by psycopg2, without a
record of the decision.

    python -m tests.bench.raw.two_phase DSN OTHER_DSN THREADS SECONDS

Prints {"per_s", "p50_us", "p99_us"}. Each thread has two connections. p50 and p99 are
of a whole transaction.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import psycopg2

from tests.bench.raw.latency import latency_us
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run


def client(number: int, dsns: list[str], ready: Barrier, seconds: float) -> list[float]:
    """Return the times of the transactions that began within `seconds` of the start."""
    connections = [psycopg2.connect(dsn) for dsn in dsns]
    ready.wait()
    start = began = time.monotonic()
    took: list[float] = []
    while began < start + seconds:
        for branch, connection in enumerate(connections):
            connection.tpc_begin(connection.xid(1, f"bench-{number}-{len(took)}", str(branch)))
            with connection.cursor() as cursor:
                cursor.execute(INSERT)
        for connection in connections:
            connection.tpc_prepare()
        for connection in connections:
            connection.tpc_commit()
        took.append(time.monotonic() - began)
        began = time.monotonic()
    for connection in connections:
        connection.close()
    return took


def main(dsns: list[str], threads: int, seconds: float) -> None:
    """Measure and print."""
    for dsn in dsns:
        run(dsn, DROP, CREATE)
    ready = Barrier(threads)
    with ThreadPoolExecutor(threads) as executor:
        futures = [executor.submit(client, n, dsns, ready, seconds) for n in range(threads)]
        took = [one for future in futures for one in future.result()]
    for dsn in dsns:
        run(dsn, DROP)
    print(json.dumps({"per_s": len(took) / seconds, **latency_us(took)}))


if __name__ == "__main__":
    main(sys.argv[1:3], int(sys.argv[3]), float(sys.argv[4]))
