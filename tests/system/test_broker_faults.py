"""Faults 40 and 41 of a broker's process: it stands still, or has no file handles
left.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from tests.freezing import freeze
from txmq import connect
from txmq.broker.reactor.process_limits import RESERVED_FILES
from txmq.client.blocking.client import Client
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S, wait_until

SESSION_S = 3.0  # longer than a busy machine stands still


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[OwnBroker]:
    with OwnBroker(tmp_path, "[consumers]\nlost_connection_grace_s = 600\n") as broker:
        yield broker


@pytest.fixture
def client(broker: OwnBroker) -> Iterator[Client]:
    with connect(broker.url, timeout=PATIENCE_S) as client:
        yield client


def test_fault_40_a_broker_that_stood_still_keeps_its_members(
    broker: OwnBroker, client: Client
) -> None:
    topic, group, pid = f"t-{uuid4().hex[:8]}", "g", broker.process.process.pid
    client.send(topic, b"x")
    with client.consumer(group, [topic], start="first", session=SESSION_S) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        before = client.call("group.show", group=group)
        freeze(pid)
        try:
            time.sleep(2 * SESSION_S)  # by which its session would be over
        finally:
            os.kill(pid, signal.SIGCONT)
        consumer.ack(message, wait=True)
        after = client.call("group.show", group=group)
    assert (after["generation"], after["members"]) == (before["generation"], 1)
    wait_until(lambda: "broker.stood_still" in broker.log, what="a line in the log")
    assert "member.lost" not in broker.log


def test_fault_41_without_free_file_handles_open_connections_go_on(
    broker: OwnBroker, client: Client
) -> None:
    topic, pid = f"t-{uuid4().hex[:8]}", broker.process.process.pid
    client.send(topic, b"before")
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (RESERVED_FILES + 8, limits[1]))
    host, port = broker.url.removeprefix("txmq://").split(":")
    with ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
        wait_until(lambda: "connection.refused" in broker.log, what="a connection is refused")
        client.send(topic, b"meanwhile")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    with connect(broker.url, timeout=PATIENCE_S) as other:
        other.send(topic, b"after")
        assert {message.body for message in other.find(topic)} == {
            b"before",
            b"meanwhile",
            b"after",
        }
