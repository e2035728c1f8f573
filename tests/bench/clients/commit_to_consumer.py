"""Measure the time from the answer to COMMIT to the message at a consumer, one
transaction at a time.

    python -m tests.bench.clients.commit_to_consumer URL DSN COUNT transaction|emit

Prints {"p50_us", "p99_us"}. With `transaction` the client sends the message, with
`emit` a relay does.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from queue import SimpleQueue
from threading import Thread

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class

import txmq
from tests.bench.raw.latency import latency_us
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run

WARM_UP = 20
COMES_WITHIN_S = 30.0


class TimedConnection(Connection):
    """A connection that records the time of the last answer to COMMIT."""

    committed_at = 0.0

    def commit(self) -> None:
        super().commit()
        self.committed_at = time.perf_counter()


def transact(client: txmq.Client, connection: Connection) -> None:
    """Commit a row and a message of the client."""
    with client.transaction(connection) as transaction, connection.cursor() as cursor:
        cursor.execute(INSERT)
        transaction.send("bench", b"order")


def emit(_client: txmq.Client, connection: Connection) -> None:
    """Commit a row and a message in the database's log."""
    with connection.cursor() as cursor:
        cursor.execute(INSERT)
        txmq.emit(connection, "bench", b"order")
    connection.commit()


HOW = {"transaction": transact, "emit": emit}


def transactions(client: txmq.Client, dsn: str, count: int, how: str) -> list[float]:
    """Return the seconds that each message took."""
    arrivals: SimpleQueue[float] = SimpleQueue()

    def consume() -> None:
        with client.consumer("bench", ["bench"]) as consumer:
            for _ in range(count):
                message = consumer.receive(COMES_WITHIN_S)
                arrivals.put(time.perf_counter())
                if message is None:
                    return
                consumer.ack(message)

    thread = Thread(target=consume)
    thread.start()
    took = []
    with closing(psycopg2.connect(dsn, connection_factory=TimedConnection)) as connection:
        for _ in range(count):
            HOW[how](client, connection)
            took.append(arrivals.get(timeout=COMES_WITHIN_S) - connection.committed_at)
    thread.join()
    return took[WARM_UP:]


def main(url: str, dsn: str, count: int, how: str) -> None:
    """Measure and print."""
    run(dsn, DROP, CREATE)
    with txmq.connect(url) as client:
        client.call("topic.create", name="bench", partitions=8)
        took = transactions(client, dsn, count + WARM_UP, how)
    run(dsn, DROP)
    print(json.dumps(latency_us(took)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
