"""Nodes as processes that begin with a copy of the leader's log."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from shutil import rmtree
from unittest.mock import patch

import pytest
from confluent_kafka import Consumer, TopicPartition

import txmq
from tests.broker.cluster.broker_nodes import BrokerNode, broker_nodes, leader_of, url_of
from tests.broker.cluster.mock_cluster import TOPIC, MockCluster
from tests.certificates import Authority
from tests.cli.support import run
from tests.kafka_nodes import KafkaNodes, needs_kafka
from tests.store.test_log_copy import Unwatched
from txmq.broker.cluster.kafka_genesis import begin_log
from txmq.broker.cluster.kafka_partition import WHOLE_READS
from txmq.broker.data_directory.backup_source import StoppedLog
from txmq.broker.data_directory.restore import restore_log, shared_genesis
from txmq.client.protocol import conversation
from txmq.config.broker import BrokerSettings
from txmq.store.backup import back_up
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.segment import list_segments
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import PATIENCE_S, wait_until

FS = RealFileSystem()
PASSWORD = "a long password"
# Each MiB is a segment, and has a snapshot; of a topic there is one more at most.
FORGETS = """
broker.segment_bytes = 1048576
broker.snapshot_bytes = 1048576
broker.preallocate_bytes = 4096
[retention]
bytes = 1048576
every_s = 0.2
"""
BODY = bytes(300_000)


def backup_of(directory: Path) -> Path:
    """Return a backup of a broker alone with a user and a message."""
    (data := directory / "alone").mkdir(mode=0o700)
    (secret := directory / "root.pw").write_text(PASSWORD)
    init = ("user", "init-admin", "root", "--data", str(data), "--password-file", str(secret))
    assert run(*init).exit_code == 0
    with BrokerThread(data) as broker:
        url = broker.url.replace("://", f"://root:{PASSWORD}@")
        # by a process that has met the log before it is restored
        with (
            patch.multiple(conversation, _newest_epochs={}, _incarnations={}),
            txmq.connect(url, timeout=PATIENCE_S) as client,
        ):
            client.send("orders", b"of the broker alone", key="k")
    (backup := directory / "backup").mkdir(mode=0o700)
    with closing(StoppedLog(FS, str(data))) as log:
        back_up(FS, log, str(backup), Unwatched())
    return backup


def damage(data: Path, body: bytes) -> None:
    """Change a byte of a message in a log of one segment."""
    [segment] = list_segments(FS, str(data))
    content = bytearray(Path(segment.path).read_bytes())
    content[content.index(body)] ^= 1
    Path(segment.path).write_bytes(content)


def test_a_broker_alone_becomes_a_cluster_whose_nodes_copy_its_log(tmp_path: Path) -> None:
    authority, kafka = Authority(tmp_path), MockCluster()
    files = authority.sign("node")
    tls = f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"'
    settings = f'cluster.ca = "{authority.ca}"\n{tls}'

    def node(name: str) -> BrokerNode:
        program = "tests.broker.cluster.mock_node"
        servers = kafka.address.servers
        return BrokerNode(tmp_path, name, servers, program, TOPIC, settings, ca=authority.ca)

    def url(of: BrokerNode) -> str:
        return of.url.replace("://", f"://root:{PASSWORD}@")

    restored = BrokerSettings(data=tmp_path / "n0")
    restore_log(FS, backup_of(tmp_path), restored, Unwatched(), is_shared=True)
    genesis = shared_genesis(FS, restored.data)
    assert genesis is not None
    assert begin_log(kafka.address, TOPIC, genesis) == genesis
    nodes = [node("n0")]
    try:
        first = nodes[0]
        with txmq.connect(url(first), timeout=PATIENCE_S) as client:
            client.send("orders", b"of the cluster", key="k")
        nodes.append(second := node("n1"))
        wait_until(lambda: second.times("cluster.follows"), what="the other node follows")
        assert second.times("copy.whole") == 1
        second.end()
        damage(second.data, b"of the broker alone")
        second.start()
        wait_until(lambda: second.times("scrub.mended"), what="it mends its copy")
        first.kill()
        with txmq.connect(url(second), timeout=PATIENCE_S) as client:
            client.send("orders", b"of the other node", key="k")
            partitions = client.call("topic.show", name="orders")["partitions"]
            found = [
                message.body
                for partition in range(partitions)
                for message in client.read("orders", partition, 0).messages
            ]
        assert found == [b"of the broker alone", b"of the cluster", b"of the other node"]
    finally:
        for one in nodes:
            one.process.kill()
            one.process.wait(PATIENCE_S)


@pytest.fixture
def nodes(kafka: KafkaNodes, tmp_path: Path) -> Iterator[list[BrokerNode]]:
    with broker_nodes(tmp_path, kafka.address.servers, FORGETS) as found:
        yield found


def first_offset(kafka: KafkaNodes) -> int:
    """Return the first offset that Kafka has not removed."""
    consumer = kafka.address.client(Consumer, WHOLE_READS)
    first, _next = consumer.get_watermark_offsets(TopicPartition("shared", 0), timeout=PATIENCE_S)
    consumer.close()
    return int(first)


def forget(kafka: KafkaNodes, url: str) -> None:
    """Send until Kafka has removed more of the log."""
    before = first_offset(kafka)
    with txmq.connect(url, timeout=PATIENCE_S) as client:

        def is_forgotten() -> bool:
            for number in range(4):
                client.send("orders", BODY, key=str(number))
            return first_offset(kafka) > before

        wait_until(is_forgotten, what="Kafka removes what nobody needs")
        client.send("orders", b"the last", key="0")


def last_of(url: str) -> set[bytes]:
    """Return the last message of each partition."""
    with txmq.connect(url, timeout=PATIENCE_S) as client:
        ends = enumerate(client.call("topic.show", name="orders")["ends"])
        return {client.read("orders", at, end - 1).messages[-1].body for at, end in ends if end}


@needs_kafka
def test_a_node_copies_what_kafka_has_removed_though_each_side_is_killed(
    nodes: list[BrokerNode], kafka: KafkaNodes
) -> None:
    url = url_of(nodes)
    leader = leader_of(nodes)
    empty, late = (node for node in nodes if node is not leader)
    late.kill()
    empty.end()
    rmtree(empty.data)
    empty.data.mkdir(mode=0o700)
    forget(kafka, f"txmq://{leader.address}")
    empty.start(TXMQ_CRASHPOINT="copy.after_segment:2")
    assert empty.process.wait(PATIENCE_S) == -signal.SIGKILL
    empty.start(TXMQ_CRASHPOINT="copy.before_end")
    assert empty.process.wait(PATIENCE_S) == -signal.SIGKILL
    leader.kill()
    leader.start()
    empty.start()
    wait_until(lambda: empty.times("copy.whole"), what="the empty node has a copy")
    late.start()  # what it read last is no longer there
    wait_until(lambda: late.times("copy.whole"), what="the late node has a copy")
    wait_until(lambda: late.times("cluster.follows") >= 2, what="it follows")
    leader_of(nodes).kill()
    assert b"the last" in last_of(url)


@needs_kafka
def test_a_backup_begins_the_log_of_a_cluster(kafka: KafkaNodes, tmp_path: Path) -> None:
    backup = backup_of(tmp_path)
    node = BrokerNode(tmp_path, "n0", kafka.address.servers, topic="again")
    node.process.wait(PATIENCE_S)  # there is no topic yet
    create = [sys.executable, "-m", "txmq", "cluster", "create", "--from", str(backup)]
    create += ["--config", str(node.config)]
    rmtree(node.data)
    for _ in range(2):  # it may be repeated
        subprocess.run(create, check=True, timeout=PATIENCE_S)
    node.start()
    try:
        url = node.url.replace("://", f"://root:{PASSWORD}@")
        with txmq.connect(url, timeout=PATIENCE_S) as client:
            assert client.send("orders", b"of the cluster", key="k").offset == 1
    finally:
        node.kill()
    rmtree(node.data)
    refused = subprocess.run(create, check=False, timeout=PATIENCE_S, capture_output=True)
    assert b"has a log already" in refused.stderr
