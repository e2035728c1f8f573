"""Kill producers between their commit and their decision, and measure when the broker
has decided.

    python -m tests.bench.clients.producer_deaths URL DSN COUNT CHECK_AFTER_S

Prints {"p50_us", "p99_us"}. The times begin when the half message is stored, by the
clock of the broker.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection as Pipe

import psycopg2

import txmq
from tests.bench.raw.latency import latency_us
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run
from txmq.crashpoints import VARIABLE

WITHIN_S = 30.0


def dying(url: str, dsn: str, check_after_s: float, pipe: Pipe) -> None:
    """Run one transaction whose decision is never sent."""
    os.environ[VARIABLE] = "tx.after_commit"
    client, connection = txmq.connect(url), psycopg2.connect(dsn)
    with (
        client.transaction(connection, check_after=check_after_s) as transaction,
        connection.cursor() as cursor,
    ):
        pipe.send(transaction.token.hex)
        cursor.execute(INSERT)
        transaction.send("bench", b"order")


def decided_after(client: txmq.Client, token: str) -> float:
    """Return the seconds from storing to decision."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        shown = client.call("tx.show", token=token)
        if shown["state"] == "PUBLISHED":
            return float(shown["decided_at"] - shown["stored_at"]) / 1e6
        time.sleep(0.02)
    raise TimeoutError(f"transaction {token} was not decided")


def main(url: str, dsn: str, count: int, check_after_s: float) -> None:
    """Measure and print."""
    run(dsn, DROP, CREATE)
    context = multiprocessing.get_context("fork")
    tokens = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=dying, args=(url, dsn, check_after_s, theirs))
        process.start()
        tokens.append(ours.recv())
        process.join(WITHIN_S)
        if process.exitcode != -signal.SIGKILL:
            raise ChildProcessError(f"a producer ended with {process.exitcode}")
    with txmq.connect(url) as client:
        took = [decided_after(client, token) for token in tokens]
    run(dsn, DROP)
    print(json.dumps(latency_us(took)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
