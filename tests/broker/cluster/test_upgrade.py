"""Nodes of a cluster are started again one by one, as for an upgrade, while services
commit transactions.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import psycopg2
import pytest

import txmq
from tests.broker.cluster.broker_nodes import (
    PARTITIONS,
    BrokerNode,
    broker_nodes,
    leader_of,
    times,
    url_of,
)
from tests.broker.cluster.test_failover import TOPIC, numbers
from tests.kafka_nodes import kafka_nodes, needs_kafka
from tests.reporting import Report
from txmq.errors import TxmqError
from txmq.testing.wait import PATIENCE_S, wait_until

pytestmark = [needs_kafka, pytest.mark.timeout(3 * PATIENCE_S)]
PRODUCERS = 3
BETWEEN = 20  # commits before and after a restart
# No node is elected by silence while another one ends in order: that takes far less.
SILENCE_S = 10.0
SETTINGS = """
cluster.silence_s = {silence_s}
[checks]
first_s = 1.0
then_s = 1.0
longest_s = 5.0
[[resolver]]
name = "shop"
dsn = "{dsn}"
"""


class TransactionalProducer:
    """Commits a row and a message at a time, and knows how each of them ended."""

    def __init__(self, url: str, dsn: str, first: int) -> None:
        self.committed: dict[int, float] = {}  # when it knew
        self.ends: Counter[str] = Counter()
        self._url, self._dsn, self._number = url, dsn, first
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connecting = txmq.connect(self._url, service="shop", timeout=PATIENCE_S)
        with connecting as client, closing(psycopg2.connect(self._dsn)) as connection:
            while not self._stops.is_set():
                try:
                    self._commit(client, connection)
                except TxmqError as error:
                    self.ends["unknown" if error.outcome == "unknown" else "refused"] += 1
                else:
                    self.committed[self._number] = time.monotonic()
                self._number += PRODUCERS

    def _commit(self, client: txmq.Client, connection: psycopg2.extensions.connection) -> None:
        with client.transaction(connection, timeout=PATIENCE_S) as transaction:
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO placed VALUES (%s)", (self._number,))
            transaction.send(TOPIC, b"%d" % self._number, key=str(self._number % 7))

    def go_on(self) -> None:
        """Wait until more is committed."""
        aim = len(self.committed) + BETWEEN
        wait_until(lambda: len(self.committed) >= aim, what="transactions commit")

    def stop(self) -> None:
        self._stops.set()
        self._thread.join(PATIENCE_S)

    def longest_pause_s(self, since: float) -> float:
        at = [since, *(one for one in self.committed.values() if one >= since)]
        return max(after - before for before, after in pairwise(at))


@pytest.fixture
def nodes(tmp_path: Path, database: str) -> Iterator[list[BrokerNode]]:
    more = SETTINGS.format(silence_s=SILENCE_S, dsn=database.replace('"', '\\"'))
    with (
        kafka_nodes(tmp_path / "kafka") as kafka,
        broker_nodes(tmp_path, kafka.address.servers, more) as found,
    ):
        yield found


def test_an_upgrade_node_by_node_is_a_short_pause(
    nodes: list[BrokerNode], database: str, report: Report
) -> None:
    with closing(psycopg2.connect(database)) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE placed (number int8 PRIMARY KEY)")
        connection.commit()
    url = url_of(nodes)
    leader = leader_of(nodes)
    with txmq.connect(url, timeout=PATIENCE_S) as client:
        client.call("topic.create", name=TOPIC, partitions=PARTITIONS)
    producers = [TransactionalProducer(url, database, number) for number in range(PRODUCERS)]
    try:
        for producer in producers:
            producer.go_on()
        began, led = time.monotonic(), times(nodes, "cluster.leads")
        for node in (*(one for one in nodes if one is not leader), leader):
            node.end()
            node.start()
            wait_until(partial(follows, url, node.name), what=f"{node.name} follows")
            for producer in producers:
                producer.go_on()
        assert times(nodes, "cluster.leads") == led + 1, "only the leader's end made a new one"
    finally:
        for producer in producers:
            producer.stop()
    pause_s = max(producer.longest_pause_s(began) for producer in producers)
    ends = sum((producer.ends for producer in producers), Counter[str]())
    committed = {number for producer in producers for number in producer.committed}
    report({
        "transactions committed": len(committed), "refused": ends["refused"],
        "of unknown outcome": ends["unknown"], "ms of the longest pause": int(pause_s * 1_000),
    })  # fmt: skip
    assert pause_s < SILENCE_S, "the next leader waited for silence"
    with txmq.connect(url, timeout=PATIENCE_S) as client:
        wait_until(lambda: is_decided(client), what="all transactions are decided")
        read = Counter(number for place in range(PARTITIONS) for number in numbers(client, place))
    with closing(psycopg2.connect(database)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT number FROM placed")
        rows = {number for (number,) in cursor.fetchall()}
    assert committed <= rows
    assert read == dict.fromkeys(rows, 1)


def follows(url: str, name: str) -> bool:
    with txmq.connect(url, timeout=PATIENCE_S) as client:
        return any(one.name == name for one in client.describe_cluster().followers)


def is_decided(client: txmq.Client) -> bool:
    states = ("undecided", "waiting", "in-doubt")
    return not any(client.call("tx.list", state=state)["transactions"] for state in states)
