"""Clients of Kafka in the process of the tests."""

from __future__ import annotations

import pytest

from txmq.broker.cluster.kafka_client import KafkaAddress

REAL_NOTE = KafkaAddress.note


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of librdkafka outlive a test: their warnings would be the next one's."""
    monkeypatch.setattr(KafkaAddress, "note", lambda _self, _error: None)
