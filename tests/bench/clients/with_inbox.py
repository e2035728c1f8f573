r"""Run handlers in threads that insert a row per message, with the inbox or without.

    python -m tests.bench.clients.with_inbox URL DSN HANDLERS inbox|plain BATCH \
        rows|statements MESSAGES

Prints {"per_s", "cpu_us"}. BATCH messages are in one transaction, 0 = one each. The
rows of a batch are inserted by one statement (`rows`) or one each (`statements`).
`cpu_us` is the CPU time of the client per message.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from threading import local
from uuid import uuid4

import psycopg2
from psycopg2.extras import execute_values

import txmq
from tests.bench.clients.consume_keys import WITHIN_S, fill
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import Connection

KEYS, IDLE_S = 10_000, 1.0
INSERT_MANY = "INSERT INTO bench_orders (customer, cents) VALUES %s"
Taken = txmq.ReceivedMessage | Sequence[txmq.ReceivedMessage]


class HandlerTimes:
    """The times at which the first and the last handler began."""

    def __init__(self) -> None:
        self.first = self.last = self.first_cpu = self.last_cpu = 0.0

    def now(self) -> None:
        self.last, self.last_cpu = time.perf_counter(), time.process_time()
        if not self.first:
            self.first, self.first_cpu = self.last, self.last_cpu


def insert(taken: Taken, connection: Connection, how: str) -> None:
    with connection.cursor() as cursor:
        if how == "rows" and not isinstance(taken, txmq.ReceivedMessage):
            execute_values(cursor, INSERT_MANY, [("c-1", 1999)] * len(taken))
            return
        for _ in range(1 if isinstance(taken, txmq.ReceivedMessage) else len(taken)):
            cursor.execute(INSERT)


def without(dsn: str, handle: Callable[[Taken, Connection], None]) -> Callable[[Taken], None]:
    """Run a handler in a transaction of its own, on its thread's connection."""
    threads = local()

    def handled(taken: Taken) -> None:
        if not hasattr(threads, "connection"):
            threads.connection = psycopg2.connect(dsn)
        handle(taken, threads.connection)
        threads.connection.commit()

    return handled


def measure(
    url: str, dsn: str, handlers: int, way: str, batch: int, how: str, messages: int
) -> dict[str, float]:
    topic, clock = f"bench-{uuid4().hex[:8]}", HandlerTimes()
    with closing(psycopg2.connect(dsn)) as connection:
        install(connection)
    run(dsn, DROP, CREATE)

    def handle(taken: Taken, connection: Connection) -> None:
        clock.now()
        insert(taken, connection, how)

    with txmq.connect(url, timeout=WITHIN_S) as client:
        fill(client, topic, KEYS, messages)
        with client.consumer(topic, [topic], prefetch_messages=messages) as consumer:
            if way == "inbox":
                consumer.run(
                    handle,
                    inbox=lambda: psycopg2.connect(dsn),
                    workers=handlers,
                    batch=batch or None,
                    idle_exit=IDLE_S,
                )
            else:
                consumer.run(
                    without(dsn, handle), workers=handlers, batch=batch or None, idle_exit=IDLE_S
                )
            assert consumer.stats.acked == messages, consumer.stats
    run(dsn, DROP)
    cpu_us = (clock.last_cpu - clock.first_cpu) / messages * 1e6
    return {"per_s": messages / (clock.last - clock.first), "cpu_us": cpu_us}


if __name__ == "__main__":
    url, dsn, handlers, way, batch, how, messages = sys.argv[1:]
    print(json.dumps(measure(url, dsn, int(handlers), way, int(batch), how, int(messages))))
