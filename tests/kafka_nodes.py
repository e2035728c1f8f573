"""Three nodes of a real Kafka on 127.0.0.1, which tests may kill and freeze.

    python -m tests.kafka_nodes

fetches Kafka's jars by Maven into `.cache/kafka`, once; `make deep` does so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, PartitionMetadata

from tests.freezing import freeze
from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.testing.ports import free_port
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import PATIENCE_S, wait_until

POM: Final = Path(__file__).with_name("kafka.pom.xml")
JARS: Final = Path(__file__).parents[1] / ".cache" / "kafka"
JAVA: Final = shutil.which("java")
needs_kafka = pytest.mark.skipif(
    JAVA is None or not JARS.exists(),
    reason="no Java, or no jars of Kafka: `python -m tests.kafka_nodes` needs Maven",
)
NODES: Final = (1, 2, 3)
SESSION_S: Final = 6  # after which a dead node is noticed
# Little memory and few threads.
SETTINGS: Final = {
    "auto.create.topics.enable": "false",
    "background.threads": 2,
    "broker.heartbeat.interval.ms": 1_000,
    "broker.session.timeout.ms": SESSION_S * 1_000,
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "log.cleaner.dedupe.buffer.size": 4 << 20,
    "num.io.threads": 2,
    "num.network.threads": 2,
    "offsets.topic.num.partitions": 1,
    "process.roles": "broker,controller",
}
MACHINE: Final = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# What `kafka-storage format` writes.
META: Final = "version=1\ncluster.id=4L6g3nShT-eMCtK--X86sw\nnode.id={}\n"


class KafkaNode:
    """A node that serves clients and votes."""

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        lines = (f"{name}={value}\n" for name, value in settings.items())
        (directory / "server.properties").write_text("".join(lines))

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the node, or let it go on."""
        if self.is_up:
            self.signal(signal.SIGCONT)
            return
        command = [str(JAVA), *MACHINE, "-cp", f"{JARS}/*", "kafka.Kafka"]
        with (self._directory / "output").open("ab") as output:
            self._process = subprocess.Popen(
                reaped([*command, self._directory / "server.properties"]),
                stdin=reaper_pipe(), stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        if self.is_up:
            self.signal(signal.SIGKILL)
            assert self._process is not None
            self._process.wait(PATIENCE_S)

    def freeze(self) -> None:
        """Stop the process until `start`."""
        assert self._process is not None
        freeze(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)


class KafkaNodes:
    """The nodes by number, and what they say of a topic."""

    def __init__(self, nodes: Mapping[int, KafkaNode], servers: str) -> None:
        self.nodes, self.address = nodes, KafkaAddress(servers)
        self.admin = self.address.client(AdminClient)

    def __getitem__(self, number: int) -> KafkaNode:
        return self.nodes[number]

    def heal(self) -> None:
        """Start all nodes, and wait until all of them take part."""
        for node in self.nodes.values():
            node.start()
        wait_until(self._are_all_there, what="Kafka's nodes are up")

    def leader(self, topic: str) -> int:
        """Return the number of the node that leads the partition, -1 without one."""
        partition = self._partition(topic)
        return partition.leader if partition else -1

    def in_sync(self, topic: str) -> set[int]:
        """Return the numbers of the nodes that have all of a topic."""
        partition = self._partition(topic)
        return set(partition.isrs) if partition else set()

    def _partition(self, topic: str) -> PartitionMetadata | None:
        with suppress(KafkaException):
            return self.admin.list_topics(topic, timeout=5).topics[topic].partitions.get(0)
        return None

    def _are_all_there(self) -> bool:
        with suppress(KafkaException):
            return len(self.admin.list_topics(timeout=5).brokers) == len(NODES)
        return False


@contextmanager
def kafka_nodes(directory: Path) -> Iterator[KafkaNodes]:
    """Run three nodes, whose files are in a directory of the caller."""
    ports = {node: free_port() for node in NODES}
    voting = {node: free_port() for node in NODES}
    voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in voting.items())
    nodes = {}
    for number in NODES:
        own, served = directory / str(number), f"PLAINTEXT://127.0.0.1:{ports[number]}"
        settings = {
            **SETTINGS,
            "node.id": number,
            "log.dirs": own / "data",
            "listeners": f"{served},CONTROLLER://127.0.0.1:{voting[number]}",
            "advertised.listeners": served,
            "controller.quorum.voters": voters,
        }
        (own / "data").mkdir(parents=True)
        (own / "data" / "meta.properties").write_text(META.format(number))
        nodes[number] = KafkaNode(own, settings)
    kafka = KafkaNodes(nodes, ",".join(f"127.0.0.1:{port}" for port in ports.values()))
    try:
        kafka.heal()
        yield kafka
    finally:
        for node in nodes.values():
            node.kill()


def fetch_jars() -> None:
    """Copy Kafka's jars and what they need into `.cache/kafka`, all or nothing."""
    new = JARS.with_name("kafka-new")
    for place in (new, JARS):
        shutil.rmtree(place, ignore_errors=True)
    copy = ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies"]
    subprocess.run([*copy, f"-DoutputDirectory={new}"], check=True)
    new.replace(JARS)


if __name__ == "__main__":
    fetch_jars()
