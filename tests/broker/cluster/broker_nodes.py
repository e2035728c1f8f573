"""Three nodes of a cluster as processes, over a real Kafka."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import txmq
from tests.broker.cluster.broker_node import BrokerNode
from txmq.testing.wait import PATIENCE_S


@contextmanager
def broker_nodes(directory: Path, servers: str, more: str = "") -> Iterator[list[BrokerNode]]:
    """Run three nodes of a new log. `more` are further settings."""
    made = [BrokerNode(directory, "n0", servers, more=more)]
    create = [sys.executable, "-m", "txmq", "cluster", "create", "--config", str(made[0].config)]
    made[0].process.wait(PATIENCE_S)  # there is no topic yet
    subprocess.run(create, check=True, timeout=PATIENCE_S)
    made[0].start()
    made += [BrokerNode(directory, f"n{number}", servers, more=more) for number in (1, 2)]
    try:
        yield made
    finally:
        for node in made:
            node.process.kill()
            node.process.wait(PATIENCE_S)


def url_of(nodes: list[BrokerNode]) -> str:
    """Return the URL that names all nodes."""
    return f"txmq://{','.join(node.address for node in nodes)}"


def times(nodes: list[BrokerNode], event: str) -> int:
    """Return how often the nodes have logged an event, together."""
    return sum(node.times(event) for node in nodes)


def leader_of(nodes: list[BrokerNode]) -> BrokerNode:
    """Return the node that serves, as soon as one does."""
    with txmq.connect(url_of(nodes), timeout=PATIENCE_S) as client:
        name = client.call("broker.show")["name"]
    return next(node for node in nodes if node.name == name)
