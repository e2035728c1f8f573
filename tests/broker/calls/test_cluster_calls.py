"""Calls about the nodes of a cluster."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from tests.broker.support import BrokerInMemory, FakeNode
from txmq.errors import RemoteProtocolError
from txmq.model.own_topics import AUDIT
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.registry import decode_call


def step_down(broker: BrokerInMemory, **args: object) -> Any:
    return broker.ask("cluster.step_down", operator="kim", reason="slow", **args)


def noted(broker: BrokerInMemory) -> int:
    return broker.engine.state.topics[AUDIT].end_offsets[0]


def test_a_leader_notes_who_had_it_step_down_before_it_does() -> None:
    node = FakeNode()
    broker = BrokerInMemory(cluster=node)
    before = noted(broker)
    assert step_down(broker) == {}
    assert node.has_stepped_down
    assert noted(broker) == before + 1
    assert broker.engine.store.durable == broker.engine.store.end


def test_a_leader_that_nobody_follows_steps_down_by_force_only() -> None:
    node = FakeNode()
    node.others = [node.others[0]._replace(role="silent")]
    broker = BrokerInMemory(cluster=node)
    assert "no other node is known to follow" in step_down(broker).message
    assert not node.has_stepped_down
    step_down(broker, force=True)
    assert node.has_stepped_down


def test_a_broker_alone_has_nobody_to_step_down_for() -> None:
    broker = BrokerInMemory()
    assert "shares its log with nobody" in step_down(broker, force=True).message
    [node] = broker.ask("cluster.describe")["nodes"]
    assert node["role"] == "leader"


def test_nodes_are_those_that_the_leader_knows() -> None:
    shown = BrokerInMemory(cluster=FakeNode()).ask("cluster.describe")
    assert [(node["name"], node["role"]) for node in shown["nodes"]] == [
        ("n1", "leader"), ("n2", "follower"),
    ]  # fmt: skip
    assert shown["answered_by"] == "n1"


@pytest.mark.parametrize(
    ("addresses", "is_valid"),
    [
        ("broker-1:7650", True),
        ("a.example:1,[::1]:65535", True),
        ("a", False),
        ("a:0", False),
        ("a:65536", False),
        ("a:1,", False),
        ("kim@a:1", False),
        ("a..b:1", False),
        ("", False),
    ],
)
def test_a_log_is_listed_with_addresses_that_clients_can_use(
    addresses: str, *, is_valid: bool
) -> None:
    call = encode_call(
        "cluster.add_logs", {"logs": [{"log_id": uuid4().hex, "addresses": addresses}]}
    )
    if is_valid:
        decode_call(call)
    else:
        with pytest.raises(RemoteProtocolError, match="invalid addresses"):
            decode_call(call)
