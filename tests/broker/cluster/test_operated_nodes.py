"""What operators do with nodes, and what they see of them, over a mock of Kafka."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

import txmq
from tests.broker.cluster.test_replaced_nodes import Nodes
from tests.certificates import Authority
from txmq.testing.ports import free_port
from txmq.testing.wait import PATIENCE_S, wait_until


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.kill()


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except HTTPError as refused:
        return refused.code, refused.read().decode()


def metrics(port: int) -> dict[str, float]:
    _status, text = fetch(port, "/metrics")
    families = text_string_to_metric_families(text)
    return {one.name: one.value for family in families for one in family.samples}


def test_a_leader_steps_down_and_follows_in_the_same_process(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.add(1)
    [leader] = nodes.there
    # The other one is under a supervisor, and tells by HTTP how it is.
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.settimeout(PATIENCE_S)
    told.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    port = free_port()
    nodes.add(1, "--http", f"127.0.0.1:{port}")
    assert told.recv(100) == b"READY=1"
    told.close()
    assert fetch(port, "/readyz") == (200, "ok\n")
    seen = metrics(port)
    assert seen["txmq_cluster_leader"] == 0
    assert seen["txmq_disk_free_bytes"] > 0
    status, said = fetch(port, "/")
    assert (status, "n0 does, at" in said) == (503, True)

    with txmq.connect(f"txmq://{leader.address}", timeout=PATIENCE_S) as client:
        client.call("cluster.step_down", operator="kim", reason="its disk is slow")
        offset = client.send("orders", b"1", key="k").offset  # at the other one
        assert offset == 0
    wait_until(lambda: nodes.there[1].leads, what="the other one leads")
    nodes.all_know()  # and so this one follows
    assert leader.times("cluster.follows_again") == 1
    assert leader.process.poll() is None
    wait_until(lambda: metrics(port)["txmq_cluster_leader"] == 1, what="its metrics say so")
    assert "txmq_topics" in metrics(port)
    assert fetch(port, "/")[0] == 200


def test_nodes_with_tls_answer_as_followers_and_as_leaders(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, Authority(tmp_path))
    try:
        nodes.add(2)
        leader, follower = sorted(nodes.there, key=lambda node: not node.leads)
        with txmq.connect(follower.url, timeout=PATIENCE_S) as client:
            client.send("orders", b"1", key="k")
            leader.kill()
            assert client.send("orders", b"2", key="k").offset == 1
    finally:
        nodes.kill()
