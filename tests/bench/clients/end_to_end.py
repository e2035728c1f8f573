"""Commit a row and a message in several processes, until a consumer has received each
message.

    python -m tests.bench.clients.end_to_end URL DSN CLIENTS SECONDS txmq|outbox

Prints {"per_s", "p50_us", "p99_us"}. With `txmq` the message is in a transaction of the
client. With `outbox` it is a row of `bench_outbox` with a NOTIFY, which
`tests.bench.raw.relay` sends. The times are from the answer to COMMIT to the arrival;
the rate is that of the arrivals.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing.synchronize import Barrier

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class

import txmq
from tests.bench.clients.transactions import BODY, READY_WITHIN_S
from tests.bench.raw.latency import latency_us
from tests.bench.raw.plain_commit import CREATE, DROP, INSERT, run

ENQUEUE = "INSERT INTO bench_outbox (body) VALUES (%s); NOTIFY bench_outbox"
COMES_WITHIN_S = 60.0
ID_BYTES = 16
# the first bytes of the body, and the time of the answer to COMMIT
Placed = list[tuple[bytes, float]]
_all_ready: Barrier


def meet(barrier: Barrier) -> None:
    """Set the barrier at which all processes wait."""
    global _all_ready  # noqa: PLW0603  # a barrier is inherited
    _all_ready = barrier


def with_client(client: txmq.Client, connection: Connection, body: bytes) -> None:
    with client.transaction(connection) as transaction, connection.cursor() as cursor:
        cursor.execute(INSERT)
        transaction.send("bench", body)


def with_outbox(_client: txmq.Client, connection: Connection, body: bytes) -> None:
    with connection.cursor() as cursor:
        cursor.execute(INSERT)
        cursor.execute(ENQUEUE, (body,))
    connection.commit()


def producer(url: str, dsn: str, seconds: float, how: str) -> Placed:
    """Return the commits within `seconds` of the common start.

    A first commit for warming up is not included.
    """
    place: Callable[[txmq.Client, Connection, bytes], None] = (
        with_client if how == "txmq" else with_outbox
    )
    with closing(psycopg2.connect(dsn)) as connection, txmq.connect(url) as client:
        place(client, connection, bytes(ID_BYTES) + BODY)
        _all_ready.wait(READY_WITHIN_S)
        placed: Placed = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            name = os.urandom(ID_BYTES)
            place(client, connection, name + BODY)
            placed.append((name, time.monotonic()))
        return placed


def arrivals(
    client: txmq.Client, executor: ProcessPoolExecutor, arguments: tuple[object, ...], count: int
) -> dict[str, float]:
    """Run the producers and receive their messages; return the figures."""
    came: dict[bytes, float] = {}
    with client.consumer("bench", ["bench"], start="first") as consumer:
        futures = [executor.submit(producer, *arguments) for _ in range(count)]  # type: ignore[arg-type]  # the arguments of `producer`
        placed: Placed | None = None
        ends = time.monotonic() + COMES_WITHIN_S + READY_WITHIN_S
        while placed is None or any(name not in came for name, _at in placed):
            message = consumer.receive(0.2)
            if message is not None:
                came[message.body[:ID_BYTES]] = time.monotonic()
                consumer.ack(message)
            elif placed is None and all(future.done() for future in futures):
                placed = [one for future in futures for one in future.result()]
            if time.monotonic() > ends:
                raise TimeoutError(f"{len(came)} messages came, not all")
    took = [came[name] - at for name, at in placed]
    lasted = max(came.values()) - min(at for _name, at in placed)
    return {"per_s": len(placed) / lasted, **latency_us(took)}


def main(url: str, dsn: str, clients: int, seconds: float, how: str) -> None:
    """Measure and print."""
    run(dsn, DROP, CREATE)
    context = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(clients, context, meet, (context.Barrier(clients),)) as executor,
        txmq.connect(url) as client,
    ):
        # fork all processes before this one has threads
        executor.submit(os.getpid).result()
        client.call("topic.create", name="bench", partitions=8)
        figures = arrivals(client, executor, (url, dsn, seconds, how), clients)
    run(dsn, DROP)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
