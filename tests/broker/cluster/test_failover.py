"""Three brokers of a cluster as processes, over a real Kafka: their leaders end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import txmq
from tests.kafka_nodes import KafkaNodes, kafka_nodes, needs_kafka
from tests.reporting import Report
from txmq.errors import TxmqError
from txmq.testing.ports import free_port
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import PATIENCE_S, wait_until

pytestmark = needs_kafka
TOPIC = "orders"
PARTITIONS = 2
BETWEEN = 30  # sends that are answered before and after the end of a leader
SETTINGS = """
[broker]
name = "{name}"
data = "{data}"
listen = "127.0.0.1:{port}"
create_topics = true
partitions = {partitions}
[cluster]
kafka = "{servers}"
topic = "shared"
"""


class BrokerNode:
    """A broker's process, which may be killed, frozen and ended."""

    def __init__(self, directory: Path, name: str, servers: str) -> None:
        self.name, self.port = name, free_port()
        self.config, self._errors = directory / f"{name}.toml", directory / f"{name}.log"
        (data := directory / name).mkdir(mode=0o700)
        text = SETTINGS.format(
            name=name, data=data, port=self.port, servers=servers, partitions=PARTITIONS
        )
        self.config.write_text(text)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "txmq", "broker", "--json", "--config", self.config]
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                reaped([str(part) for part in command]),
                stdin=reaper_pipe(), stdout=errors, stderr=errors,
            )  # fmt: skip

    @property
    def is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def times(self, event: str) -> int:
        """Return how often the broker has logged an event, in all of its lives."""
        lines = self._errors.read_text().splitlines()
        events = (json.loads(line).get("event") for line in lines if line.startswith("{"))
        return sum(found == event for found in events)


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
def kafka(tmp_path: Path) -> Iterator[KafkaNodes]:
    with kafka_nodes(tmp_path / "kafka") as nodes:
        yield nodes


@pytest.fixture
def nodes(kafka: KafkaNodes, tmp_path: Path) -> Iterator[list[BrokerNode]]:
    made = [BrokerNode(tmp_path, f"n{number}", kafka.address.servers) for number in range(1)]
    create = [sys.executable, "-m", "txmq", "cluster", "create", "--config", str(made[0].config)]
    made[0].process.wait(PATIENCE_S)  # there is no topic yet
    subprocess.run(create, check=True, timeout=PATIENCE_S)
    subprocess.run(create, check=True, timeout=PATIENCE_S)  # which changes nothing
    made[0].start()
    made += [BrokerNode(tmp_path, f"n{number}", kafka.address.servers) for number in (1, 2)]
    try:
        yield made
    finally:
        for node in made:
            node.process.kill()
            node.process.wait(PATIENCE_S)


def kill(node: BrokerNode) -> None:
    node.process.kill()
    assert node.process.wait(PATIENCE_S) == -signal.SIGKILL
    node.start()


def end(node: BrokerNode) -> None:
    node.process.terminate()
    assert node.process.wait(PATIENCE_S) == 0
    node.start()


def freeze(node: BrokerNode) -> None:
    node.process.send_signal(signal.SIGSTOP)


def leader_of(nodes: list[BrokerNode]) -> BrokerNode:
    def listening() -> list[BrokerNode]:
        return [node for node in nodes if node.is_listening]

    wait_until(listening, what="a node leads")
    return listening()[0]


def test_a_cluster_outlives_its_leaders(nodes: list[BrokerNode], report: Report) -> None:
    url = "txmq://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    producer = Producer(url)
    ends: tuple[Callable[[BrokerNode], None], ...] = (kill, freeze, end, kill)
    try:
        for how in ends:
            producer.go_on()
            leader = leader_of(nodes)
            led = sum(node.times("cluster.leads") for node in nodes)
            how(leader)
            producer.go_on()
            assert sum(node.times("cluster.leads") for node in nodes) > led
            if how is freeze:  # it wakes, and sees that another node leads
                leader.process.send_signal(signal.SIGCONT)
                wait_until(partial(leader.times, "cluster.follows_again"), what="it follows again")
    finally:
        producer.end()
    with txmq.connect(url, timeout=PATIENCE_S) as client:
        read = Counter(number for place in range(PARTITIONS) for number in numbers(client, place))
    report({"sends answered": len(producer.answered), "ends of leaders": len(ends)})
    assert set(producer.answered) <= read.keys()
    assert max(read.values()) == 1


def numbers(client: txmq.Client, partition: int) -> Iterator[int]:
    offset = 0
    while found := client.read(TOPIC, partition, offset).messages:
        yield from (int(message.body) for message in found)
        offset = found[-1].offset + 1
