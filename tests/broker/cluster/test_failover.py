"""Three brokers of a cluster as processes, over a real Kafka: their leaders end."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import txmq
from tests import freezing
from tests.broker.cluster.broker_nodes import (
    PARTITIONS,
    BrokerNode,
    broker_nodes,
    leader_of,
    times,
    url_of,
)
from tests.kafka_nodes import KafkaNodes, needs_kafka
from tests.reporting import Report
from txmq.errors import TxmqError
from txmq.testing.wait import PATIENCE_S, wait_until

pytestmark = needs_kafka
TOPIC = "orders"
BETWEEN = 30  # sends that are answered before and after the end of a leader


class Producer:
    """Sends one message after the other, and knows which of them were answered."""

    def __init__(self, url: str) -> None:
        self.url, self.answered = url, list[int]()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._send_all)
        self._thread.start()

    def _send_all(self) -> None:
        number = 0
        with txmq.connect(self.url, service="shop", timeout=PATIENCE_S) as client:
            while not self._ends.is_set():
                with suppress(TxmqError):
                    client.send(TOPIC, b"%d" % number, key=str(number % 7))
                    self.answered.append(number)
                number += 1

    def go_on(self) -> None:
        """Wait until more sends are answered."""
        aim = len(self.answered) + BETWEEN
        wait_until(lambda: len(self.answered) >= aim, what="sends are answered")

    def end(self) -> None:
        self._ends.set()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def nodes(kafka: KafkaNodes, tmp_path: Path) -> Iterator[list[BrokerNode]]:
    with broker_nodes(tmp_path, kafka.address.servers) as found:
        yield found


def kill(node: BrokerNode) -> None:
    node.kill()
    node.start()


def end(node: BrokerNode) -> None:
    node.end()
    node.start()


def freeze(node: BrokerNode) -> None:
    freezing.freeze(node.process.pid)


def step_down(node: BrokerNode) -> None:
    with txmq.connect(f"txmq://{node.address}", timeout=PATIENCE_S) as client:
        client.call("cluster.step_down", operator="kim", reason="its machine is replaced")


def test_a_cluster_outlives_its_leaders(nodes: list[BrokerNode], report: Report) -> None:
    producer = Producer(url_of(nodes))
    ends: tuple[Callable[[BrokerNode], None], ...] = (kill, freeze, step_down, end, kill)
    try:
        for how in ends:
            producer.go_on()
            leader = leader_of(nodes)
            led, followed = times(nodes, "cluster.leads"), leader.times("cluster.follows_again")
            how(leader)
            producer.go_on()
            assert times(nodes, "cluster.leads") > led
            if how is freeze:  # it wakes, and sees that another node leads
                leader.process.send_signal(signal.SIGCONT)
            if how in (freeze, step_down):
                again = partial(_follows_again, leader, followed)
                wait_until(again, what="it follows again")
                assert leader.process.poll() is None
    finally:
        producer.end()
    with txmq.connect(producer.url, timeout=PATIENCE_S) as client:
        read = Counter(number for place in range(PARTITIONS) for number in numbers(client, place))
        noted = [one.call for one in client.audit()]
    report({"sends answered": len(producer.answered), "ends of leaders": len(ends)})
    assert set(producer.answered) <= read.keys()
    assert max(read.values()) == 1
    assert "cluster.step_down" in noted


def _follows_again(node: BrokerNode, before: int) -> bool:
    return node.times("cluster.follows_again") > before


def numbers(client: txmq.Client, partition: int) -> Iterator[int]:
    offset = 0
    while found := client.read(TOPIC, partition, offset).messages:
        yield from (int(message.body) for message in found)
        offset = found[-1].offset + 1
