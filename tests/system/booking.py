"""A worker that places each order in two databases and a topic, by two-phase commit,
until it dies or is to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path
from random import Random

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.system.farm import Job, Lane
from tests.system.orders import Order
from tests.system.placing import PATIENCE_S, ChangedMind, Journal, connected, write_order
from txmq import connect
from txmq.client import Client

CHECK_AFTER_S = 5.0
# with prepared transactions nobody sees a deadlock over two databases
IMPATIENCE = "SET lock_timeout = '5s'"


def work(job: Job, lane: Lane, go_on: Callable[[], bool]) -> None:
    """Places orders. The first argument of the lane is the DSN of the second database,
    the others are keys.
    """
    other, *keys = lane.arguments
    journal, random, turns = Journal(Path(job.directory)), Random(), cycle(keys)
    with connect(job.url, service="orders", timeout=PATIENCE_S, retries=20) as client:
        while go_on():
            with closing(connected(job.dsn)) as first, closing(connected(other)) as second:
                pair = (first, second)
                with suppress(psycopg2.Error):
                    for connection in pair:
                        connection.cursor().execute(IMPATIENCE)
                        connection.commit()
                    while go_on() and not any(connection.closed for connection in pair):
                        _place(client, pair, job.topic, next(turns), journal, random)


def _place(
    client: Client,
    pair: tuple[Connection, Connection],
    topic: str,
    key: str,
    journal: Journal,
    random: Random,
) -> None:
    """One order, and what the caller was told of it."""
    transaction = client.xa(*pair, timeout=PATIENCE_S, check_after=CHECK_AFTER_S)
    token = transaction.token.hex
    with journal.kept(token), transaction:
        first, second = (
            Order(token, key, write_order(connection, token, key)) for connection in pair
        )
        if (
            first != second
            # others came in between where the first server has crashed, and with it this
            # transaction
        ):
            pair[0].cursor().execute("SELECT")
        assert first == second, "both databases count the same orders"
        transaction.send(topic, first.encode(), key=key)
        _think_again(random)


def _think_again(random: Random) -> None:
    if not random.randrange(8):
        raise ChangedMind
