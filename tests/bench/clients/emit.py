"""Commit one row and one emitted message per transaction, in several processes, until a
relay has delivered all.

    python -m tests.bench.clients.emit URL DSN CLIENTS SECONDS

Prints {"per_s", "committed_per_s"}. `per_s` counts the messages at the broker until the
last one is there.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing

import psycopg2

import txmq
from tests.bench.clients.transactions import BODY, meet, ready
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run
from txmq.testing.wait import wait_until

ARRIVE_WITHIN_S = 300.0


def client(dsn: str, seconds: float) -> int:
    """Return the number of transactions that began within `seconds` of the common
    start.
    """
    with closing(psycopg2.connect(dsn)) as connection:
        ready()
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            with connection.cursor() as cursor:
                cursor.execute(INSERT)
            txmq.emit(connection, "bench", BODY)
            connection.commit()
            count += 1
        return count


def arrived(client: txmq.Client) -> int:
    """Return the number of messages in the topic."""
    return sum(client.call("topic.show", name="bench")["ends"])


def main(url: str, dsn: str, clients: int, seconds: float) -> None:
    """Measure and print."""
    run(dsn, DROP, CREATE)
    context = multiprocessing.get_context("fork")
    with txmq.connect(url) as broker:
        broker.call("topic.create", name="bench", partitions=8)
        start = time.monotonic()
        with ProcessPoolExecutor(clients, context, meet, (context.Barrier(clients),)) as executor:
            futures = [executor.submit(client, dsn, seconds) for _ in range(clients)]
            count = sum(future.result() for future in futures)
        wait_until(lambda: arrived(broker) >= count, ARRIVE_WITHIN_S, what=f"{count} messages")
        took = time.monotonic() - start
    run(dsn, DROP)
    print(json.dumps({"per_s": count / took, "committed_per_s": count / seconds}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
