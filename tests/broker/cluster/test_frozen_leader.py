"""Clients whose leader is frozen: its connections stay open, and nobody answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import txmq
from tests.broker.cluster.broker_nodes import BrokerNode
from tests.broker.cluster.test_replaced_nodes import Nodes, next_of
from tests.freezing import freeze
from txmq.client.protocol.address import Address, parse_url
from txmq.client.protocol.conversation import LogIdentity
from txmq.testing.wait import PATIENCE_S

ATTEMPTS = 60  # of a call, so that each of them is short
SENT = [b"1", b"2", b"3"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    nodes.add(3)
    yield nodes
    nodes.kill()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The addresses that clients have tried, one after the other."""
    found: list[Address] = []
    in_turn = LogIdentity.in_turn

    def noted(
        log: LogIdentity, given: Iterable[Address], left: Callable[[], float]
    ) -> Iterator[tuple[Address, float]]:
        for address, share in in_turn(log, given, left):
            found.append(address)
            yield address, share

    monkeypatch.setattr(LogIdentity, "in_turn", noted)
    return found


def freeze_leader(nodes: Nodes) -> BrokerNode:
    """Freeze the node that leads."""
    leader = nodes.leader()
    freeze(leader.process.pid)
    return leader


def wake(nodes: Nodes, node: BrokerNode) -> None:
    node.process.send_signal(signal.SIGCONT)
    nodes.all_know()
    assert not node.leads


def stored(nodes: Nodes) -> list[bytes]:
    with txmq.connect(nodes.leader().url, timeout=PATIENCE_S) as client:
        found = (client.read("orders", partition, 0).messages for partition in range(2))
        return sorted(message.body for messages in found for message in messages)


def test_a_send_and_a_consumer_go_on_at_who_leads_after_a_frozen_node(
    nodes: Nodes, tried: list[Address]
) -> None:
    url = nodes.leader().url
    with (
        txmq.connect(url, timeout=PATIENCE_S, retries=ATTEMPTS - 1) as client,
        client.consumer("billing", ["orders"], start="first") as consumer,
        capture_logs() as told,
    ):
        client.send("orders", b"1", key="k")
        assert next_of(consumer) == b"1"
        frozen = freeze_leader(nodes)
        tried.clear()
        client.send("orders", b"2", key="k")
        assert tried[0] != parse_url(frozen.url)[0]
        assert next_of(consumer) == b"2"
        [error] = [one["error"] for one in told if one["event"] == "consumer.disconnected"]
        assert "another node leads" in error
        wake(nodes, frozen)
        client.send("orders", b"3", key="k")
    assert stored(nodes) == SENT


def test_a_send_of_asyncio_goes_on_at_who_leads_after_a_frozen_node(
    nodes: Nodes, tried: list[Address]
) -> None:
    async def send() -> None:
        url = nodes.leader().url
        async with txmq.aio.connect(url, timeout=PATIENCE_S, retries=ATTEMPTS - 1) as client:
            await client.send("orders", b"1", key="k")
            frozen = freeze_leader(nodes)
            tried.clear()
            await client.send("orders", b"2", key="k")
            assert tried[0] != parse_url(frozen.url)[0]
            await asyncio.to_thread(wake, nodes, frozen)
            await client.send("orders", b"3", key="k")

    asyncio.run(send())
    assert stored(nodes) == SENT
