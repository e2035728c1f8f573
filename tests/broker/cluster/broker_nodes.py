"""Brokers of a cluster as processes, over a real Kafka."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import txmq
from txmq.testing.ports import free_port
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import PATIENCE_S

PARTITIONS = 2
SETTINGS = """
[broker]
name = "{name}"
data = "{data}"
listen = "127.0.0.1:{port}"
create_topics = true
partitions = {partitions}
{more}
[cluster]
kafka = "{servers}"
topic = "shared"
silence_s = {silence_s}
"""


class BrokerNode:
    """A broker's process, which may be killed, frozen and ended."""

    def __init__(
        self, directory: Path, name: str, servers: str, silence_s: float, more: str
    ) -> None:
        self.name, self.port = name, free_port()
        self.config, self._errors = directory / f"{name}.toml", directory / f"{name}.log"
        (data := directory / name).mkdir(mode=0o700)
        text = SETTINGS.format(
            name=name, data=data, port=self.port, servers=servers, partitions=PARTITIONS,
            silence_s=silence_s, more=more,
        )  # fmt: skip
        self.config.write_text(text)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "txmq", "broker", "--json", "--config", self.config]
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                reaped([str(part) for part in command]),
                stdin=reaper_pipe(), stdout=errors, stderr=errors,
            )  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(PATIENCE_S) == -signal.SIGKILL

    def end(self) -> None:
        """Have it drain and end."""
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0

    def times(self, event: str) -> int:
        """Return how often the broker has logged an event, in all of its lives."""
        lines = self._errors.read_text().splitlines()
        events = (json.loads(line).get("event") for line in lines if line.startswith("{"))
        return sum(found == event for found in events)


@contextmanager
def broker_nodes(
    directory: Path, servers: str, *, silence_s: float = 1.5, more: str = ""
) -> Iterator[list[BrokerNode]]:
    """Run three nodes of a new log. `more` are further settings."""

    def node(number: int) -> BrokerNode:
        return BrokerNode(directory, f"n{number}", servers, silence_s, more)

    made = [node(0)]
    made[0].process.wait(PATIENCE_S)  # there is no topic yet
    create = [sys.executable, "-m", "txmq", "cluster", "create", "--config", str(made[0].config)]
    subprocess.run(create, check=True, timeout=PATIENCE_S)
    made[0].start()
    made += [node(1), node(2)]
    try:
        yield made
    finally:
        for one in made:
            one.process.kill()
            one.process.wait(PATIENCE_S)


def url_of(nodes: list[BrokerNode]) -> str:
    """Return the URL that names all nodes."""
    return "txmq://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


def times(nodes: list[BrokerNode], event: str) -> int:
    """Return how often the nodes have logged an event, together."""
    return sum(node.times(event) for node in nodes)


def leader_of(nodes: list[BrokerNode]) -> BrokerNode:
    """Return the node that serves, as soon as one does."""
    with txmq.connect(url_of(nodes), timeout=PATIENCE_S) as client:
        name = client.call("broker.show")["name"]
    return next(node for node in nodes if node.name == name)
