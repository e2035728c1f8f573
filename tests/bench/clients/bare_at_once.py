"""Commit one row per transaction by a driver alone, from workers of one process.

    python -m tests.bench.clients.bare_at_once DSN WORKERS SECONDS HOW

HOW as for `transactions_at_once`, whose round trips to the database these are: BEGIN,
the row, one more statement, COMMIT. Prints {"per_s", "cpu_us"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import closing
from threading import Barrier, Thread
from typing import Any

import psycopg2

from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run
from tests.client.aio.databases import DATABASES

ONE_MORE = "SELECT 1"  # where txmq writes the token row


def in_threads(dsn: str, workers: int, seconds: float) -> tuple[int, float]:
    """Return the number of transactions, and their CPU time."""
    done: list[int] = []
    ready = Barrier(workers + 1)

    def work() -> None:
        with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
            ready.wait()
            count, ends = 0, time.monotonic() + seconds
            while time.monotonic() < ends:
                cursor.execute(INSERT)
                cursor.execute(ONE_MORE)
                connection.commit()
                count += 1
            done.append(count)

    threads = [Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    ready.wait()
    before = time.process_time()
    for thread in threads:
        thread.join()
    return sum(done), time.process_time() - before


async def in_tasks(dsn: str, workers: int, seconds: float, how: str) -> tuple[int, float]:
    """Return the number of transactions, and their CPU time."""
    database = DATABASES[how]
    connections = [await database.connect(dsn) for _ in range(workers)]
    before, ends = time.process_time(), time.monotonic() + seconds

    async def work(connection: Any) -> int:
        count = 0
        while time.monotonic() < ends:
            async with database.transaction(connection):
                await database.execute(connection, INSERT)
                await database.execute(connection, ONE_MORE)
            count += 1
        return count

    counts = await asyncio.gather(*map(work, connections))
    cpu = time.process_time() - before
    for connection in connections:
        await database.close(connection)
    return sum(counts), cpu


def main(dsn: str, workers: int, seconds: float, how: str) -> None:
    """Measure and print."""
    run(dsn, DROP, CREATE)
    if how == "threads":
        count, cpu = in_threads(dsn, workers, seconds)
    else:
        count, cpu = asyncio.run(in_tasks(dsn, workers, seconds, how))
    run(dsn, DROP)
    print(json.dumps({"per_s": count / seconds, "cpu_us": cpu / count * 1e6}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
