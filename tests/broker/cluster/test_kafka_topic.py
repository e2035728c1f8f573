"""What a topic must be like, told without a Kafka. `test_kafka` has one."""

from __future__ import annotations

import pytest

from tests.broker.cluster.mock_cluster import TOPIC, MockCluster
from txmq.broker.cluster import kafka_topic
from txmq.broker.cluster.kafka_topic import NEEDED, Topic, check, create, dangers
from txmq.errors import LogUnavailable

RIGHT = {name: str(needed) for name, needed in NEEDED.items()}


def test_a_topic_with_what_is_needed_or_more_is_right() -> None:
    more = {name: str(needed + 1) for name, needed in NEEDED.items() if isinstance(needed, int)}
    for settings in (RIGHT, RIGHT | more):
        assert [*dangers(Topic("id", settings), ())] == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("partitions", "2", "partitions is 2, and must be 1"),
        ("replication.factor", "2", "replication.factor is 2, and must be at least 3"),
        ("min.insync.replicas", "1", "min.insync.replicas is 1, and must be at least 2"),
        (
            "unclean.leader.election.enable",
            "true",
            "unclean.leader.election.enable is true, and must be false",
        ),
        ("cleanup.policy", "compact", "cleanup.policy is compact, and must be delete"),
        (
            "cleanup.policy",
            "compact,delete",
            "cleanup.policy is compact,delete, and must be delete",
        ),
        ("retention.ms", "604800000", "retention.ms is 604800000, and must be -1"),
        ("retention.bytes", "1", "retention.bytes is 1, and must be -1"),
        ("max.message.bytes", "900000", "max.message.bytes is 900000, and must be at least 922688"),
        ("min.insync.replicas", None, "min.insync.replicas is not known, and must be at least 2"),
    ],
)
def test_a_topic_that_may_lose_records_is_told_by_the_setting(
    name: str, value: str | None, said: str
) -> None:
    topic = Topic("id", RIGHT | {name: value})
    assert [*dangers(topic, ())] == [said]
    assert [*dangers(topic, {name})] == []


def test_a_kafka_that_does_not_answer_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_topic, "WITHIN_S", 0.5)
    cluster = MockCluster()
    cluster.cut()
    for ask in (check, create):
        with pytest.raises(LogUnavailable, match="are Kafka's nodes up"):
            ask(cluster.address, TOPIC)
