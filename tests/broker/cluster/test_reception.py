"""What a node answers while another one leads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.access.support import VERIFIER, BrokerWithUsers
from tests.broker.support import HELLO, BrokerInMemory, send_payload
from txmq import errors
from txmq.broker.cluster.reception import Reception
from txmq.config.broker import load_broker
from txmq.core.users import SetUser
from txmq.model.cluster import ClusterView, NodeRole, NodeView
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.status import to_error


def node(name: str, role: NodeRole) -> NodeView:
    return NodeView(name, f"{name}:7650", role, 4, 100, 0, 0.0, 1.0, "1.0")


class ThreeNodes:
    """What the node knows: the second one leads."""

    nodes: tuple[NodeView, ...] = (
        node("n1", "follower"), node("n2", "leader"), node("n3", "silent")
    )  # fmt: skip

    def view(self) -> ClusterView:
        return ClusterView("log", 4, "n1", self.nodes)

    def addresses(self) -> tuple[str, ...]:
        return "n2:7650", "n1:7650"


class Follower(BrokerWithUsers):
    """The state of a node that follows, and its reception."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = ThreeNodes()
        settings = load_broker(None, {"data": "/data", "name": "n1"})
        self.reception = Reception(self.engine, settings, self.clock, self.nodes)
        self.end = self.log.end

    def protocol(self) -> object:
        return self.reception.sessions.buildProtocol(None)


def test_a_client_that_seeks_the_leader_is_sent_there() -> None:
    follower = Follower()
    client = follower.connect(None)
    with pytest.raises(errors.LoginFailed):
        follower.log_in("shop", "wrong password")
    with pytest.raises(errors.NotLeader, match="n1 does not lead: n2 does, at n2:7650") as raised:
        follower.log_in("shop")
    assert raised.value.nodes == ("n2:7650", "n1:7650")
    follower.nodes.nodes = (node("n1", "follower"),)
    with pytest.raises(errors.NotLeader, match="nobody is known to"):
        follower.log_in("shop")
    follower.nodes.nodes = (node("n1", "leader"),)
    with pytest.raises(errors.NotLeader, match="it is about to"):
        follower.log_in("shop")
    assert not client.replies()


def test_a_stranger_learns_nothing_of_the_nodes() -> None:
    client = Follower().connect(None)
    client.send(HELLO)
    assert isinstance(client.refusal(), errors.LoginFailed)


def test_nodes_are_described_and_nothing_else_is_done() -> None:
    follower = Follower()
    client = follower.log_in("root", any_node=True)
    told: Any = client.call("cluster.describe")
    assert [one["name"] for one in told["nodes"]] == ["n1", "n2", "n3"]
    for opcode, payload in (
        (Opcode.CALL, encode_call("topic.create", {"name": "t", "partitions": 1})),
        (Opcode.CALL, encode_call("broker.show", {})),
        (Opcode.SEND, send_payload()),
        (Opcode.PING, b""),
    ):
        reply = client.ask(opcode, payload)
        assert isinstance(to_error(reply.status, reply.payload), errors.NotLeader)
    follower.pass_time(1)
    assert follower.log.end == follower.end


def test_a_user_without_the_right_is_denied_and_nothing_is_written() -> None:
    follower = Follower()
    reply = follower.log_in("nobody", any_node=True).ask(
        Opcode.CALL, encode_call("cluster.describe", {})
    )
    assert isinstance(to_error(reply.status, reply.payload), errors.AccessDenied)
    follower.pass_time(1)
    assert follower.log.end == follower.end
    # the leader changes the user, and the follower reads that
    follower.do(SetUser("nobody", ("operator",), tuple(VERIFIER), "test", b"x" * 32))  # type: ignore[arg-type]  # a plain tuple
    assert follower.log_in("nobody", any_node=True).call("cluster.describe")


def test_a_broker_alone_is_the_one_node_of_its_log() -> None:
    broker = BrokerInMemory()
    told: Any = broker.ask("cluster.describe")
    assert told["log_id"] == str(broker.log.log_id)
    assert [(one["name"], one["role"]) for one in told["nodes"]] == [("broker-1", "leader")]
