"""How clients find the nodes of a cluster: each names the others.

The nodes are brokers that follow a script, of one log.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.client.faces.face import Face
from tests.client.scripted_broker import FakeBroker, HangUp, Reaction, Silent
from txmq.client.blocking.connections import pool
from txmq.errors import NotLeader
from txmq.model.cluster import ClusterView, NodeView
from txmq.testing.ports import free_port
from txmq.wire.calls.registry import decode_call
from txmq.wire.chunks import pack_chunks
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame
from txmq.wire.hello import Hello

EVERYTHING = frozenset(Opcode)
ATTEMPTS = 200  # of a call, so that each of them is short


class Node(FakeBroker):
    """A node of a cluster, which leads unless it is told who does.

    `frozen` are the opcodes that it does not answer.
    """

    frozen: Container[int] = ()
    hangs_up_on = ""  # a call, once

    def __init__(self, *, log_id: UUID, greeted: list[Node] | None = None) -> None:
        """`greeted` gets the node whenever a client says hello."""
        super().__init__(log_id=log_id)
        self._greeted = [] if greeted is None else greeted

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _react(self, frame: Frame) -> Reaction:
        if frame.opcode == Opcode.HELLO:
            self._greeted.append(self)
        greeting = self.greeting
        if frame.opcode == Opcode.HELLO and Hello.parse(frame).any_node:
            self.greeting = None
        try:
            reaction = super()._react(frame)
            return Silent if frame.opcode in self.frozen else reaction
        finally:
            self.greeting = greeting

    def _call(self, frame: Frame) -> Reaction:
        if decode_call(frame.payload)[0] != self.hangs_up_on:
            return super()._call(frame)
        self.hangs_up_on = ""
        return HangUp

    def follow(self, *nodes: Node) -> None:
        """Refuse clients, and name nodes to them, the leader first."""
        self.hang_up()
        self.refuse_hello(NotLeader("it does not lead", detail={"nodes": addresses(nodes)}))

    def take_over(self, *nodes: Node) -> None:
        """Lead after another node."""
        self.boot_epoch += 1
        self.lead(*nodes)

    def lead(self, *nodes: Node) -> None:
        """Greet clients, and name nodes to them."""
        self.greeting, self.nodes = None, addresses((self, *nodes))


def addresses(nodes: tuple[Node, ...]) -> list[str]:
    return [node.address for node in nodes]


@pytest.fixture
def greeted() -> list[Node]:
    """The nodes that clients have said hello to, one after the other."""
    return []


@pytest.fixture
def nodes(greeted: list[Node]) -> Iterator[list[Node]]:
    """Three nodes, of which the first leads, as all know."""
    with ExitStack() as opened:
        log_id = uuid4()  # whose boot epochs no other test has met
        nodes = [opened.enter_context(Node(log_id=log_id, greeted=greeted)) for _ in range(3)]
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


async def sent(client: Any, topic: str = "orders", body: bytes = b"1") -> int:
    return int((await client.send(topic, body)).offset)


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


@pytest.mark.parametrize("topic", ["orders", "not-known-yet"])
async def test_a_client_of_a_frozen_leader_asks_the_others_who_leads(
    face: Face, nodes: list[Node], greeted: list[Node], topic: str
) -> None:
    first, second, third = nodes
    client = face.connect(first.url, retries=ATTEMPTS - 1)
    await client.send("orders", b"1")
    second.follow(first, second, third)
    third.follow(first, second, third)
    first.frozen = EVERYTHING
    greeted.clear()
    sending = face.begin(sent(client, topic, b"2"))
    await face.until(lambda: third in greeted, "it asks the others")
    assert greeted.index(second) == 0  # not the first, whose connection is open
    await face.until(lambda: len(greeted) > len(nodes), "it asks again while nobody leads")
    third.take_over(second)
    second.follow(third, first, second)
    assert await sending == 0
    assert third.bodies() == [[b"2"]]
    assert all(sent in third.origins() for sent in origins_of(first, b"2"))  # it is known again
    await client.send(topic, b"3")
    assert greeted[-1] is third


async def test_a_leader_may_freeze_after_others_than_a_request_were_answered(
    face: Face, nodes: list[Node]
) -> None:
    first, second, third = nodes
    client = face.connect(first.url, retries=ATTEMPTS - 1)
    await client.send("orders", b"1")
    third.others = lambda _frame: b"".join(pack_chunks([], next_offset=7))
    first.frozen = {Opcode.READ}
    reading = face.begin(end(client))
    await face.until(lambda: has_been_asked(first, Opcode.READ), "the read is at the leader")
    await client.send("orders", b"2")
    first.frozen = EVERYTHING
    third.take_over(second)
    second.follow(third, first, second)
    assert await reading == 7


async def end(client: Any) -> int:
    return int((await client.read("orders", 0, 0)).next_offset)


def has_been_asked(node: Node, opcode: int) -> bool:
    return any(frame.opcode == opcode for frame in node.frames)


async def test_a_request_that_may_be_repeated_outlives_its_connection(
    face: Face, nodes: list[Node]
) -> None:
    client = face.connect(nodes[0].url)
    await client.send("orders", b"1")
    nodes[0].hangs_up_on = "topic.describe"
    assert await sent(client, "not-known-yet") == 1


async def test_requests_stay_at_a_leader_that_is_busy(
    face: Face, nodes: list[Node], greeted: list[Node]
) -> None:
    first, second, third = nodes
    client = face.connect(first.url, retries=ATTEMPTS - 1)
    await begun(face, client, b"1")
    second.follow(first, second, third)
    third.follow(first, second, third)
    first.frozen = EVERYTHING - {Opcode.HELLO}
    greeted.clear()
    sending = face.begin(begun(face, client, b"2"))
    await face.until(lambda: first in greeted, "it asks all of them")
    assert {second, third} <= {*greeted}
    assert len(origins_of(first, b"2")) == 1
    first.frozen = ()
    first.hang_up()
    assert await sending > 0


async def begun(face: Face, client: Any, body: bytes) -> int:
    return int((await (await face.begin_send(client, "orders", body))).offset)


def origins_of(node: Node, body: bytes) -> list[tuple[bytes, int]]:
    """Return producer id and sequence of the sends of a body."""
    sends = zip(node.origins(), node.bodies(), strict=True)
    return [origin for origin, bodies in sends if bodies == [body]]


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
    nodes[1].hangs_up_on = "cluster.describe"
    assert await client.describe_cluster() == view
