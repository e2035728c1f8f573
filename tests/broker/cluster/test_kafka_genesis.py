"""How a log begins in a topic, and whether a topic is the one that was read."""

from __future__ import annotations

from uuid import UUID

import pytest
from confluent_kafka import Producer

from tests.broker.cluster.mock_cluster import TOPIC, MockCluster
from txmq.broker.cluster import kafka_genesis
from txmq.broker.cluster.kafka_genesis import begin_log, read_genesis, require_known
from txmq.broker.cluster.kafka_partition import SAFE_WRITES
from txmq.errors import ConfigError, LogUnavailable, StoreError
from txmq.store.shared.records import Genesis, checksum_of, encode
from txmq.store.shared.rules import Place
from txmq.testing.wait import PATIENCE_S

FIRST, SECOND = (Genesis(UUID(int=number), 0, 64, 1_000) for number in (1, 2))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MockCluster:
    monkeypatch.setattr(kafka_genesis, "WITHIN_S", PATIENCE_S)
    return MockCluster()


def test_a_log_that_begins_is_begun_once(cluster: MockCluster) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_genesis(cluster.address, TOPIC)
    assert begin_log(cluster.address, TOPIC, FIRST) == FIRST
    assert begin_log(cluster.address, TOPIC, SECOND) == FIRST
    assert read_genesis(cluster.address, TOPIC) == FIRST
    require_known(cluster.address, TOPIC, Place(0, checksum_of(encode(FIRST))))
    with pytest.raises(StoreError, match="no such record at offset 1"):
        require_known(cluster.address, TOPIC, Place(1, checksum_of(encode(FIRST))))


def test_of_two_that_begin_a_log_at_once_the_first_one_does(cluster: MockCluster) -> None:
    kafka_genesis._write(cluster.address, TOPIC, FIRST)
    kafka_genesis._write(cluster.address, TOPIC, SECOND)
    assert begin_log(cluster.address, TOPIC, SECOND) == FIRST


def test_a_topic_with_something_else_is_left_alone(cluster: MockCluster) -> None:
    producer = cluster.address.client(Producer, SAFE_WRITES)
    producer.produce(TOPIC, b"an order", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    with pytest.raises(ConfigError, match="has records that are no log's"):
        begin_log(cluster.address, TOPIC, FIRST)


@pytest.mark.parametrize("place", [Place(0, 5), Place(1, 0), Place(900, 0)])
def test_a_topic_that_lacks_what_was_read_is_another_one(
    cluster: MockCluster, place: Place
) -> None:
    begin_log(cluster.address, TOPIC, FIRST)
    with pytest.raises(StoreError, match="is not the topic that this node has read"):
        require_known(cluster.address, TOPIC, place)


def test_a_kafka_that_does_not_answer_is_told_apart(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_genesis, "WITHIN_S", 0.5)
    cluster.cut()
    with pytest.raises(LogUnavailable):
        begin_log(cluster.address, TOPIC, FIRST)
