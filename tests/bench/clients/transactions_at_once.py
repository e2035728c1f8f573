"""Commit one row and one message per transaction, from several workers of one process.

    python -m tests.bench.clients.transactions_at_once URL DSN WORKERS SECONDS HOW

HOW: "threads" of the blocking face with psycopg2, or tasks of asyncio with "psycopg" or
"asyncpg". Prints {"per_s", "cpu_us"}. The database must have the schema of txmq.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from threading import Barrier, Thread
from typing import Any

import psycopg2

import txmq
import txmq.aio
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run
from tests.client.aio.databases import DATABASES

BODY = bytes(256)


def in_threads(url: str, dsn: str, workers: int, seconds: float) -> tuple[int, float]:
    """Return the number of transactions, and their CPU time."""
    done: list[int] = []
    ready = Barrier(workers + 1)
    with txmq.connect(url) as client:

        def work() -> None:
            with closing(psycopg2.connect(dsn)) as connection:
                count = -1  # the first one makes requests that are made once only
                ready_at = None
                while ready_at is None or time.monotonic() < ready_at + seconds:
                    with client.transaction(connection) as tx, connection.cursor() as cursor:
                        cursor.execute(INSERT)
                        tx.send("bench", BODY)
                    count += 1
                    if ready_at is None:
                        ready.wait()
                        ready_at = time.monotonic()
                done.append(count)

        threads = [Thread(target=work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        ready.wait()
        before = time.process_time()
        for thread in threads:
            thread.join()
        return sum(done), time.process_time() - before


async def in_tasks(url: str, dsn: str, workers: int, seconds: float, how: str) -> tuple[int, float]:
    """Return the number of transactions, and their CPU time."""
    database = DATABASES[how]
    connections = [await database.connect(dsn) for _ in range(workers)]
    async with txmq.aio.connect(url) as client:

        async def work(connection: Any, goes_on: Callable[[], bool]) -> int:
            count = 0
            while goes_on():
                async with client.transaction(connection) as tx:
                    await database.execute(connection, INSERT)
                    tx.send("bench", BODY)
                count += 1
            return count

        for connection in connections:  # requests that are made once only
            await work(connection, iter((True, False)).__next__)
        ends, before = time.monotonic() + seconds, time.process_time()
        counts = await asyncio.gather(
            *(work(connection, lambda: time.monotonic() < ends) for connection in connections)
        )
        cpu = time.process_time() - before
    for connection in connections:
        await database.close(connection)
    return sum(counts), cpu


def main(url: str, dsn: str, workers: int, seconds: float, how: str) -> None:
    """Measure and print."""
    run(dsn, DROP, CREATE)
    if how == "threads":
        count, cpu = in_threads(url, dsn, workers, seconds)
    else:
        count, cpu = asyncio.run(in_tasks(url, dsn, workers, seconds, how))
    run(dsn, DROP)
    print(json.dumps({"per_s": count / seconds, "cpu_us": cpu / count * 1e6}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
