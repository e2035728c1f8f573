"""A real broker under attack: another client's sends all go through, and the memory
stays bounded. The attacks are those of `make bench ONLY=store.hostile`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.bench.clients.attack import ATTACKS
from tests.bench.harness import measured, python, rss_anon, sampled, serving
from txmq.testing.own_broker import OwnBroker
from txmq.testing.ports import free_port
from txmq.testing.wait import PATIENCE_S

WITNESS_S = 1.5
MAX_RSS = 250e6
QUICK = ("unfinished_frames", "pipelined_reads", "long_polls", "slow_http")
SCENES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.soak)
    for name in ATTACKS
    if name != "console"  # which needs 100,000 topics
]


class Attacked:
    """A broker with its admin pages."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.broker = OwnBroker(directory, f'[broker]\nhttp = "127.0.0.1:{self.port}"\n')

    def health(self) -> bytes:
        """Return the reply of the health check."""
        with closing(socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(4_096), b""))


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    attacked = Attacked(tmp_path)
    with attacked.broker:
        yield attacked


@pytest.mark.parametrize("scene", SCENES)
def test_a_witness_is_served_and_memory_is_bounded(attacked: Attacked, scene: str) -> None:
    url, pid = attacked.broker.url, attacked.broker.process.process.pid
    clients = "tests.bench.clients"
    attack = python(f"{clients}.attack", scene, url, attacked.port, "witness")
    with sampled(lambda: float(rss_anon(pid))) as memory, serving(attack, PATIENCE_S):
        found = measured(python(f"{clients}.witness", url, "witness", WITNESS_S))
        assert attacked.health().endswith(b"ok\n")
    assert found["sent"] > 0
    assert found["refused"] == 0
    assert max(memory) <= MAX_RSS
    assert "broker.fault" not in attacked.broker.log
