"""Yardstick: a number of committed INSERTs, shared among threads with a connection
each.
"""

from __future__ import annotations

import time
from contextlib import closing
from itertools import count
from threading import Barrier, Thread

import psycopg2

from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run

WITHIN_S = 60.0


def commits_per_s(dsn: str, threads: int, transactions: int) -> float:
    """Return the rate from the time when all are connected to the last COMMIT."""
    run(dsn, DROP, CREATE)
    begin, numbers = Barrier(threads + 1, timeout=WITHIN_S), count()

    def work() -> None:
        with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
            begin.wait()
            while next(numbers) < transactions:
                cursor.execute(INSERT)
                connection.commit()

    workers = [Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    begin.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    run(dsn, DROP)
    return transactions / took
