"""The copy of the log of whoever leads, over librdkafka's mock of Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.broker.cluster.mock_cluster import TOPIC, MockCluster
from tests.store.log.harness import DIRECTORY, LOG_ID, new_disk
from tests.store.test_log_copy import Leader, check
from txmq.broker.cluster import kafka_genesis, leaders_log
from txmq.broker.cluster.kafka_genesis import begin_log, find_leader
from txmq.broker.cluster.kafka_partition import NUMBER, SAFE_WRITES
from txmq.broker.cluster.leaders_log import copy_from_leader, password_of
from txmq.errors import BrokerUnavailable, DiskFull, LogUnavailable
from txmq.store.log.segment import HEADER_SIZE
from txmq.store.log_copy import ForeignCopy
from txmq.store.shared.records import Genesis, NodeStatus, PartitionRecord, Slice, encode
from txmq.testing.wait import PATIENCE_S

DATA = Path(DIRECTORY)


class Topic:
    """A topic with a log, and what its nodes have written there."""

    def __init__(self) -> None:
        self.kafka = MockCluster()
        self.address = self.kafka.address
        self._producer = self.address.client(Producer, SAFE_WRITES)
        begin_log(self.address, TOPIC, Genesis(LOG_ID, 0, HEADER_SIZE, 1_000))

    def close(self) -> None:
        self._producer.close()

    def write(self, *records: PartitionRecord) -> None:
        for record in records:
            self._producer.produce(TOPIC, encode(record), partition=NUMBER)
        assert self._producer.flush(PATIENCE_S) == 0

    def leads(self, name: str, epoch: int) -> NodeStatus:
        """Have a node say of itself, and write as the leader."""
        nonce = name.encode() * 8
        said = NodeStatus(LOG_ID, epoch, nonce, 64, 0, name, "1", f"{name}:1")
        self.write(said, Slice(LOG_ID, epoch, nonce, 64, 64, b""))
        return said


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Topic]:
    monkeypatch.setattr(kafka_genesis, "WITHIN_S", PATIENCE_S)
    monkeypatch.setattr(leaders_log, "RETRY_S", 0.0)
    topic = Topic()
    yield topic
    topic.close()


def test_the_leader_is_the_node_of_the_latest_epoch(topic: Topic) -> None:
    topic.leads("n1", 1)
    leader = topic.leads("n2", 2)
    topic.leads("n1", 1)  # it wakes
    topic.write(
        NodeStatus(LOG_ID, 2, b"n3" * 8, 64, 0, "n3", "1", "n3:1"), Genesis(LOG_ID, 0, 0, 0)
    )
    assert find_leader(topic.address, TOPIC) == leader


def test_where_no_leader_has_said_of_itself_none_is_found(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_genesis, "SILENT_AFTER_S", 0.5)
    leader = topic.leads("n1", 1)
    topic.write(leader._replace(leaves=True), Slice(LOG_ID, 2, b"n2" * 8, 64, 64, b""))
    with pytest.raises(LogUnavailable, match="no node leads"):
        find_leader(topic.address, TOPIC)


def test_a_copy_goes_on_at_the_next_leader(topic: Topic) -> None:
    first, asked, fs = topic.leads("n1", 1), list[tuple[str, str]](), new_disk()
    node = Leader()

    @contextmanager
    def log_at(address: str, password: str) -> Iterator[Leader]:
        asked.append((address, password))
        if address == first.address:
            topic.leads("n2", 2)
            raise BrokerUnavailable("it has ended")
        yield node

    copy_from_leader(topic.address, TOPIC, fs, DATA, 0, log_at)
    assert asked == [("n1:1", password_of(b"n1" * 8)), ("n2:1", password_of(b"n2" * 8))]
    check(fs, node)
    fs.lock(f"{DIRECTORY}/lock").release()


@pytest.mark.parametrize("error", [DiskFull("no space"), ForeignCopy("another log")])
def test_a_copy_that_cannot_go_on_says_so(topic: Topic, error: Exception) -> None:
    topic.leads("n1", 1)

    @contextmanager
    def log_at(_address: str, _password: str) -> Iterator[Leader]:
        raise error
        yield

    fs = new_disk()
    with pytest.raises(type(error)):
        copy_from_leader(topic.address, TOPIC, fs, DATA, 0, log_at)
    fs.lock(f"{DIRECTORY}/lock").release()
