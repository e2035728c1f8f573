"""A Kafka, and clients of it in the process of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker.cluster.mock_cluster import MockCluster
from tests.kafka_nodes import KafkaNodes, kafka_nodes
from txmq.broker.cluster.kafka_partition import _Worker
from txmq.testing.wait import PATIENCE_S


@pytest.fixture(autouse=True)
def _clients_end() -> Iterator[None]:
    """End what would look for Kafka at ports that other tests have by then."""
    yield
    workers = [thread for thread in threading.enumerate() if isinstance(thread, _Worker)]
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(PATIENCE_S)
    MockCluster.end_all()


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaNodes]:
    """Three nodes of Kafka, for one test."""
    with kafka_nodes(tmp_path / "kafka") as nodes:
        yield nodes
