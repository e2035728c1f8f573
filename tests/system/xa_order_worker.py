"""A worker that places each order in two databases and a topic, by two-phase commit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path
from random import Random

import psycopg
import psycopg2

from tests.system.order_worker import (
    Abandoned,
    Journal,
    connect_to_database,
    write_order,
)
from tests.system.orders import PlacedOrder
from tests.system.supervisor import SupervisorConfig, WorkerSpec
from txmq import connect
from txmq.client.blocking.client import Client
from txmq.testing.wait import PATIENCE_S
from txmq.tx.postgres.driver import BlockingConnection as Connection

CHECK_AFTER_S = 5.0
# no server detects a deadlock over two databases
LOCK_TIMEOUT = "SET lock_timeout = '5s'"


def run_worker(
    config: SupervisorConfig, worker: WorkerSpec, keep_running: Callable[[], bool]
) -> None:
    """Place orders. The first argument of the worker is the DSN of the second database,
    the others are keys.
    """
    second_dsn, *keys = worker.arguments
    journal, random, turns = Journal(Path(config.directory)), Random(), cycle(keys)
    with connect(config.url, service="orders", timeout=PATIENCE_S, retries=20) as client:
        while keep_running():
            with (
                closing(connect_to_database(config.dsn)) as first,
                closing(connect_to_database(second_dsn)) as second,
            ):
                pair = (first, second)
                with suppress(psycopg2.Error, psycopg.Error):
                    for connection in pair:
                        connection.cursor().execute(LOCK_TIMEOUT)
                        connection.commit()
                    while keep_running() and not any(connection.closed for connection in pair):
                        _place(client, pair, config.topic, next(turns), journal, random)


def _place(
    client: Client,
    pair: tuple[Connection, Connection],
    topic: str,
    key: str,
    journal: Journal,
    random: Random,
) -> None:
    """Place one order, and note its outcome."""
    transaction = client.xa(*pair, timeout=PATIENCE_S, check_after=CHECK_AFTER_S)
    token = transaction.token.hex
    with journal.recording(token), transaction:
        first, second = (
            PlacedOrder(token, key, write_order(connection, token, key)) for connection in pair
        )
        if first != second:
            # Orders came in between if the first server crashed; then its connection is
            # lost, and this statement fails.
            pair[0].cursor().execute("SELECT")
        assert first == second, "both databases count the same orders"
        transaction.send(topic, first.encode(), key=key)
        _perhaps_abandon(random)


def _perhaps_abandon(random: Random) -> None:
    if not random.randrange(8):
        raise Abandoned
