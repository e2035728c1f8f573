"""Store undecided half messages on one connection; half of them have the row of a
commit.

    python -m tests.bench.clients.halves URL DSN COUNT CHECK_AFTER_S

Prints {"per_s"}.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from uuid import UUID

import psycopg2

import txmq
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.parts import split_into_parts
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.decider import ByPostgres
from txmq.model.message import Message
from txmq.tx.postgres.blocking import read_server
from txmq.wire.bundle import BundleDescription, pack_part
from txmq.wire.data_requests import Opcode

WINDOW = 256
WITHIN_S = 120.0
ROWS = "INSERT INTO txmq_token (tok, log_id) SELECT unnest(%s::uuid[]), %s::uuid"


def store(client: txmq.Client, description: BundleDescription, tokens: list[UUID]) -> None:
    """Store a bundle of one message for each token, many at a time."""
    connection = client._core.open_connection(time.monotonic() + WITHIN_S)
    try:
        for start in range(0, len(tokens), WINDOW):
            deadline = time.monotonic() + WITHIN_S
            written = []
            for token in tokens[start : start + WINDOW]:
                buffer = Buffer(client._core.topics)
                buffer.add("bench", Message(b"order", key=token.hex), time.time_ns() // 1_000, None)
                [part] = split_into_parts(token, description, buffer.build(token).batches)
                written.append(connection.write(Opcode.GROUP, pack_part(part), deadline))
            for correlation in written:
                connection.read(correlation, deadline)
    finally:
        connection.close()


def main(url: str, dsn: str, count: int, check_after_s: float) -> None:
    """Store and print."""
    tokens = [new_token() for _ in range(count)]
    with txmq.connect(url) as client, closing(psycopg2.connect(dsn)) as connection:
        client.call("topic.create", name="bench", partitions=8)
        decider = ByPostgres(*read_server(connection).identity, xid=None, position=1)
        with connection.cursor() as cursor:
            cursor.execute(ROWS, ([str(token) for token in tokens[::2]], str(client.log_id)))
        connection.commit()
        began = time.monotonic()
        store(client, BundleDescription(decider, "bench", (), int(check_after_s * 1e6)), tokens)
    print(json.dumps({"per_s": count / (time.monotonic() - began)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
