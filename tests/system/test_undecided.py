"""A crash leaves thousands of transactions undecided: each of them ends as its row in
the database says.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psycopg2

import txmq
from tests.bench.clients.halves import ROWS, store
from tests.client.real import RealBroker
from txmq.client.protocol.transaction.tokens import new_token
from txmq.testing.wait import wait_until
from txmq.tx.postgres.identity import read_server
from txmq.wire.group import Description

COUNT = 3_000
DECIDED_WITHIN_S = 60.0


def test_what_a_crash_left_undecided_is_published_or_dropped_by_its_rows(
    database: str, tmp_path: Path
) -> None:
    tokens = [new_token() for _ in range(COUNT)]
    broker = RealBroker(tmp_path / "broker", [database])
    with txmq.connect(broker.url) as client, closing(psycopg2.connect(database)) as connection:
        client.call("topic.create", name="bench", partitions=4)
        decider = ("postgres", *read_server(connection).identity, None)
        with connection.cursor() as cursor:
            cursor.execute(ROWS, ([str(token) for token in tokens[::2]], str(client.log_id)))
        connection.commit()
        store(client, Description(decider, "bench", (), 5_000_000), tokens)
        broker.kill()
        broker.start()
        wait_until(lambda: not client.call("tx.oldest")["undecided"], DECIDED_WITHIN_S)
    published = {found.key for found in broker.read("bench")}
    assert published == {token.hex for token in tokens[::2]}
    broker.stop()
