"""How clients find the nodes of a cluster: each names the others.

The nodes are brokers that follow a script, of one log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from tests.client.faces.face import Face
from tests.client.scripted_broker import FakeBroker, Reaction
from txmq.client.blocking.connections import pool
from txmq.errors import NotLeader
from txmq.model.cluster import ClusterView, NodeView
from txmq.testing.ports import free_port
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame
from txmq.wire.hello import Hello


class Node(FakeBroker):
    """A node of a cluster, which leads unless it is told who does."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _react(self, frame: Frame) -> Reaction:
        greeting = self.greeting
        if frame.opcode == Opcode.HELLO and Hello.parse(frame).any_node:
            self.greeting = None
        try:
            return super()._react(frame)
        finally:
            self.greeting = greeting

    def follow(self, *nodes: Node) -> None:
        """Refuse clients, and name nodes to them, the leader first."""
        self.hang_up()
        self.refuse_hello(NotLeader("it does not lead", detail={"nodes": addresses(nodes)}))

    def lead(self, *nodes: Node) -> None:
        """Greet clients, and name nodes to them."""
        self.greeting, self.nodes = None, addresses((self, *nodes))


def addresses(nodes: tuple[Node, ...]) -> list[str]:
    return [node.address for node in nodes]


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Three nodes, of which the first leads, as all know."""
    with ExitStack() as opened:
        log_id = uuid4()  # whose boot epochs no other test has met
        nodes = [opened.enter_context(Node(log_id=log_id)) for _ in range(3)]
        nodes[0].lead(*nodes[1:])
        for node in nodes[1:]:
            node.follow(nodes[0])
        yield nodes


async def test_a_node_that_does_not_lead_sends_clients_to_the_leader(
    face: Face, nodes: list[Node]
) -> None:
    leader, asked, other = nodes
    client = face.connect(f"txmq://{asked.address},{other.address}")
    assert (await client.send("orders", b"1")).offset == 0
    assert (asked.accepted, other.accepted) == (1, 0)
    assert leader.bodies() == [[b"1"]]


async def test_clients_go_on_at_nodes_that_their_url_does_not_name(
    face: Face, nodes: list[Node]
) -> None:
    first, second, third = nodes
    client = face.connect(first.url)
    await client.send("orders", b"1")
    third.lead(second)
    second.follow(third)
    first.close()
    assert (await client.send("orders", b"2")).offset == 0
    assert third.bodies() == [[b"2"]]


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_node_that_joins_while_a_client_is_connected_is_known(
    face: Face, nodes: list[Node], monkeypatch: pytest.MonkeyPatch, *, is_idle: bool
) -> None:
    monkeypatch.setattr(pool, "FRESH_S", 0.0)  # as if it had been idle for longer
    first, second, third = nodes
    for node in (second, third):
        node.close()
    client = face.connect(first.url)
    await client.send("orders", b"1")
    with Node(log_id=first.log_id) as fourth:
        first.lead(fourth)
        first.welcome_again()
        fourth.lead()
        if not is_idle:
            await client.send("orders", b"2")  # whose reply comes behind the news
        first.close()
        await client.send("orders", b"3")
        assert fourth.bodies() == [[b"3"]]


async def test_a_leader_that_nobody_knows_is_waited_for(face: Face, nodes: list[Node]) -> None:
    first, second, third = nodes
    for node in nodes:
        node.follow()
    client = face.connect(f"txmq://127.0.0.1:{free_port()},{first.address},{second.address}")
    sending = face.begin(sent(client))
    await face.until(lambda: first.accepted > 1, "it tries again")
    first.follow(third)
    third.lead()
    assert await sending == 0


async def sent(client: Any) -> int:
    return int((await client.send("orders", b"1")).offset)


async def test_a_node_of_an_earlier_boot_is_passed_over(face: Face, nodes: list[Node]) -> None:
    first, second, third = nodes
    second.boot_epoch, third.boot_epoch = 2, 1
    second.lead()
    client = face.connect(f"txmq://{second.address},{first.address},{third.address}")
    await client.send("orders", b"1")
    first.follow(second)
    third.lead()  # as one does that does not know yet that it was deposed
    second.close()
    sending = face.begin(sent(client))
    await face.until(lambda: third.accepted > 1, "it tries again")
    first.boot_epoch = 3
    first.lead()
    assert await sending == 0
    assert not third.sends


async def test_a_cluster_is_described_by_any_node_also_while_nobody_leads(
    face: Face, nodes: list[Node]
) -> None:
    for node in nodes:
        node.follow()
    told = NodeView("n2", nodes[1].address, "follower", 4, 100, 8, 0.5, 1.5, "1.0")
    view = ClusterView("log", 4, "n2", (told,))
    nodes[1].answers["cluster.describe"] = {
        **view._asdict(),
        "nodes": [told._asdict()],
        "logs": {"version": 0, "logs": []},
    }
    client = face.connect(f"txmq://127.0.0.1:{free_port()},{nodes[1].address}")
    described = await client.describe_cluster()
    assert described == view
    assert described.leader is None
