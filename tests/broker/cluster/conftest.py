"""A Kafka, and clients of it in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kafka_nodes import KafkaNodes, kafka_nodes
from txmq.broker.cluster.kafka_client import KafkaAddress

REAL_NOTE = KafkaAddress.note


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of librdkafka outlive a test: their warnings would be the next one's."""
    monkeypatch.setattr(KafkaAddress, "note", lambda _self, _error: None)


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaNodes]:
    """Three nodes of Kafka, for one test."""
    with kafka_nodes(tmp_path / "kafka") as nodes:
        yield nodes
