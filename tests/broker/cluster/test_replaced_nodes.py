"""All nodes of a cluster are replaced while a client stays connected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import txmq
from tests.broker.cluster.broker_nodes import BrokerNode
from tests.broker.cluster.mock_cluster import TOPIC, MockCluster
from tests.certificates import Authority
from txmq.broker.cluster.kafka_genesis import begin_log
from txmq.store.log.segment import HEADER_SIZE
from txmq.store.shared.records import Genesis
from txmq.testing.wait import PATIENCE_S, wait_until


class Nodes:
    """Brokers over one mock of Kafka. They have TLS where an authority is given."""

    def __init__(self, directory: Path, authority: Authority | None = None) -> None:
        self._directory, self._kafka = directory, MockCluster()
        self._ca, self._settings = None, ""
        if authority is not None:
            self._ca, files = authority.ca, authority.sign("node")
            self._settings = f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"'
        begin_log(self._kafka.address, TOPIC, Genesis(uuid4(), 0, HEADER_SIZE, 1_000))
        self.there: list[BrokerNode] = []
        self._made = 0

    def add(self, count: int, *options: str) -> None:
        """Start nodes with these options of the command."""
        for _ in range(count):
            servers, name = self._kafka.address.servers, f"n{self._made}"
            program = "tests.broker.cluster.mock_node"
            node = BrokerNode(
                self._directory, name, servers, program, TOPIC, self._settings, options, self._ca
            )
            self.there.append(node)
            self._made += 1
        self.all_know()

    def all_know(self) -> None:
        """Wait until each node knows all others, and who of them leads."""
        names = {node.name for node in self.there}
        wait_until(
            lambda: all(names == known_by(node) for node in self.there), what=f"all know {names}"
        )

    def leader(self) -> BrokerNode:
        wait_until(lambda: any(node.leads for node in self.there), what="a node leads")
        return next((node for node in self.there if node.leads), self.there[0])

    def retire(self, node: BrokerNode) -> None:
        self.there.remove(node)
        node.end()
        self.all_know()

    def kill(self) -> None:
        for node in self.there:
            node.process.kill()
            node.process.wait(PATIENCE_S)


def known_by(node: BrokerNode) -> set[str]:
    """Return the names of the nodes that are there, none while nobody leads."""
    view = node.view()
    if view is None or view.leader is None:
        return set()
    return {one.name for one in view.nodes if one.role in {"leader", "follower"}}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.kill()


def test_a_client_outlives_all_nodes_that_it_was_told_of_first(nodes: Nodes) -> None:
    nodes.add(2)
    leader, follower = sorted(nodes.there, key=lambda node: not node.leads)
    with txmq.connect(f"txmq://{follower.address}", timeout=PATIENCE_S) as client:
        client.send("orders", b"1", key="k")
        with client.consumer("billing", ["orders"], start="first") as consumer:
            received = [next_of(consumer)]
            nodes.add(2)
            nodes.retire(follower)
            nodes.retire(leader)
            client.send("orders", b"2", key="k")
            received.append(next_of(consumer))
            nodes.leader().process.kill()
            client.send("orders", b"3", key="k")
            received.append(next_of(consumer))
    assert received == [b"1", b"2", b"3"]


def next_of(consumer: txmq.Consumer) -> bytes:
    """Return the next message that the consumer gets, and acknowledge it."""
    message = consumer.receive(PATIENCE_S)
    assert message is not None
    consumer.ack(message, wait=True)
    return message.body
