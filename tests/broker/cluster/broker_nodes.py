"""Nodes of a cluster as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import txmq
from txmq.errors import TxmqError
from txmq.testing.ports import free_port
from txmq.testing.processes import whole_lines
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import PATIENCE_S

PARTITIONS = 2
SETTINGS = """
cluster.kafka = "{servers}"
cluster.topic = "{topic}"
broker.name = "{name}"
broker.data = "{data}"
broker.listen = "127.0.0.1:{port}"
broker.create_topics = true
broker.partitions = {partitions}
{more}
"""


class BrokerNode:
    """A broker's process, which may be killed, frozen and ended."""

    def __init__(
        self,
        directory: Path,
        name: str,
        servers: str,
        program: str = "txmq",
        topic: str = "shared",
        more: str = "",
        options: Sequence[str] = (),
        ca: Path | None = None,
    ) -> None:
        """`program` is the module that runs a broker, `more` are further settings, and
        `options` those of its command. `ca` has signed its certificate, None = no TLS.
        """
        self._options, self._ca = options, ca
        self._program = program
        self.name, self.port = name, free_port()
        self.config, self._errors = directory / f"{name}.toml", directory / f"{name}.log"
        self.data = directory / name
        self.data.mkdir(mode=0o700, exist_ok=True)
        text = SETTINGS.format(
            name=name, data=self.data, port=self.port, servers=servers, partitions=PARTITIONS,
            topic=topic, more=more,
        )  # fmt: skip
        self.config.write_text(text)
        self.start()

    def start(self, **environment: str) -> None:
        broker = ["broker", "--json", "--config", self.config, *self._options]
        command = [sys.executable, "-m", self._program, *broker]
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                reaped([str(part) for part in command]),
                stdin=reaper_pipe(), stdout=errors, stderr=errors, env=os.environ | environment,
            )  # fmt: skip

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The URL that names this node alone."""
        if self._ca is None:
            return f"txmq://{self.address}"
        return f"txmqs://{self.address}/?ca={self._ca}"

    @property
    def leads(self) -> bool:
        """Return whether the node says so itself."""
        view = self.view()
        leader = view and view.leader
        return leader is not None and view is not None and leader.name == self.name

    def view(self) -> txmq.ClusterView | None:
        """Return the nodes that it knows, None while it does not answer."""
        with txmq.connect(self.url, timeout=1) as client, suppress(TxmqError):
            return client.describe_cluster()
        return None

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(PATIENCE_S) == -signal.SIGKILL

    def end(self) -> None:
        """End it in order."""
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0

    def times(self, event: str) -> int:
        """Return how often the broker has logged an event, in all of its lives."""
        lines = (line for line in whole_lines(self._errors) if line.startswith("{"))
        events = (json.loads(line).get("event") for line in lines)
        return sum(found == event for found in events)


@contextmanager
def broker_nodes(
    directory: Path, servers: str, more: str = "", program: str = "txmq"
) -> Iterator[list[BrokerNode]]:
    """Run three nodes of a new log, over a real Kafka. `more` are further settings."""
    made = [BrokerNode(directory, "n0", servers, program, more=more)]
    create = [sys.executable, "-m", "txmq", "cluster", "create", "--config", str(made[0].config)]
    made[0].process.wait(PATIENCE_S)  # there is no topic yet
    for _ in range(2):  # once more changes nothing
        subprocess.run(create, check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)
    made[0].start()
    made += [BrokerNode(directory, name, servers, program, more=more) for name in ("n1", "n2")]
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
