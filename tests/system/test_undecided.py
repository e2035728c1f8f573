"""A crash leaves thousands of transactions undecided, and their rows decide each of
them.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psycopg2

import txmq
from tests.bench.clients.halves import ROWS, store
from tests.client.real import RealBroker
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.decider import ByPostgres
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import read_server
from txmq.wire.bundle import BundleDescription

COUNT = 3_000


def test_transactions_left_undecided_by_a_crash_end_as_their_rows_say(
    database: str, tmp_path: Path
) -> None:
    tokens = [new_token() for _ in range(COUNT)]
    broker = RealBroker(tmp_path / "broker", [database])
    with txmq.connect(broker.url) as client, closing(psycopg2.connect(database)) as connection:
        client.call("topic.create", name="bench", partitions=4)
        decider = ByPostgres(*read_server(connection).identity, xid=None, position=1)
        with connection.cursor() as cursor:
            cursor.execute(ROWS, ([str(token) for token in tokens[::2]], str(client.log_id)))
        connection.commit()
        store(client, BundleDescription(decider, "bench", (), 5_000_000), tokens)
        broker.kill()
        broker.start()
        wait_until(lambda: not client.call("tx.oldest")["undecided"], what="all are decided")
    published = {found.key for found in broker.read("bench")}
    assert published == {token.hex for token in tokens[::2]}
    broker.stop()
