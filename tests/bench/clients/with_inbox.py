"""Handlers in threads, each message an INSERT in a transaction that also remembers the message; or the INSERT alone.

python -m tests.bench.clients.with_inbox URL DSN HANDLERS BATCH MESSAGES         prints {"per_s"}

BATCH messages go into one transaction, 0 = a transaction each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from uuid import uuid4

import psycopg2

import txmq
from tests.bench.clients.taking import WITHIN_S, fill
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import Connection

KEYS, IDLE_S = 10_000, 1.0


def one(_message: txmq.ReceivedMessage, connection: Connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute(INSERT)


def several(messages: Sequence[txmq.ReceivedMessage], connection: Connection) -> None:
    with connection.cursor() as cursor:
        for _message in messages:
            cursor.execute(INSERT)


class Clock:
    """When the first transaction began and the last one ended, without the wait for more messages behind it."""

    def __init__(self) -> None:
        self.first = self.last = 0.0

    def now(self) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last


def measure(url: str, dsn: str, handlers: int, batch: int, messages: int) -> dict[str, float]:
    topic, clock = f"bench-{uuid4().hex[:8]}", Clock()
    with closing(psycopg2.connect(dsn)) as connection:
        install(connection)
    run(dsn, DROP, CREATE)

    def handle(taken: txmq.ReceivedMessage | Sequence[txmq.ReceivedMessage], connection: Connection) -> None:
        clock.now()
        if isinstance(taken, txmq.ReceivedMessage):
            one(taken, connection)
        else:
            several(taken, connection)

    with txmq.connect(url, timeout=WITHIN_S) as client:
        fill(client, topic, KEYS, messages)
        with client.consumer(topic, [topic], prefetch_messages=messages) as consumer:
            consumer.run(
                handle, inbox=lambda: psycopg2.connect(dsn), threads=handlers, batch=batch or None, idle_exit=IDLE_S
            )
            assert consumer.stats.acked == messages, consumer.stats
    run(dsn, DROP)
    return {"per_s": messages / (clock.last - clock.first)}


if __name__ == "__main__":
    url, dsn, *numbers = sys.argv[1:]
    print(json.dumps(measure(url, dsn, *map(int, numbers))))
