"""Yardstick: the relay of a transactional outbox on psycopg2.

    python -m tests.bench.raw.relay URL DSN notify|poll

Prints `ready relay`. Rows go in order, one batch at a time, through the txmq client to
the same broker. NOTIFY wakes the relay, or it polls every 100 ms.
"""

from __future__ import annotations

import select
import sys
import time
from contextlib import closing

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class

import txmq

POLL_S = 0.1
AT_ONCE = 1_000
TAKE = f"SELECT id, body FROM bench_outbox ORDER BY id LIMIT {AT_ONCE} FOR UPDATE"
DELETE = "DELETE FROM bench_outbox WHERE id = ANY (%s)"


def relayed(connection: Connection, client: txmq.Client) -> int:
    """Send the waiting rows, then delete them; return their number."""
    with connection, connection.cursor() as cursor:
        cursor.execute(TAKE)
        rows = cursor.fetchall()
        if rows:
            client.send_many("bench", [bytes(body) for _id, body in rows])
            cursor.execute(DELETE, ([row_id for row_id, _body in rows],))
        return len(rows)


def main(url: str, dsn: str, how: str) -> None:
    with (
        closing(psycopg2.connect(dsn)) as connection,
        closing(psycopg2.connect(dsn)) as ears,
        txmq.connect(url) as client,
    ):
        ears.autocommit = True
        with ears.cursor() as cursor:
            cursor.execute("LISTEN bench_outbox")
        print("ready relay", flush=True)
        while True:
            count = relayed(connection, client)
            if how == "poll" and count < AT_ONCE:
                time.sleep(POLL_S)
            if how == "poll" or count:
                continue
            select.select([ears], [], [], 5)
            ears.poll()
            ears.notifies.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
