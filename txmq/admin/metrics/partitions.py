"""Metrics of each partition, on a path of their own: `/metrics/partitions`.

Their names and labels are those of kafka_exporter with another prefix, but for
`txmq_consumergroup_partition_lag`, whose name there is that of the sum here.
`?topic=NAME` and `?group=NAME` bound them to one; without, the first `MAX_SERIES` are
given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from txmq.core.consumers import progress
from txmq.core.state import visibility

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.core.state.state import State
    from txmq.core.steps import Steps

MAX_SERIES = 10_000
PARTITIONS_PER_STEP = 64  # between two looks at the clock


class TopicPartitionRow(NamedTuple):
    """The offsets of a partition."""

    topic: str
    partition: int
    oldest: int
    current: int


class GroupPartitionRow(NamedTuple):
    """The position of a group in a partition."""

    group: str
    topic: str
    partition: int
    current: int
    lag: int


class PartitionMetrics:
    """Metrics of each partition of a broker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def steps(self, topic: str | None, group: str | None) -> Steps[bytes]:
        """Return the metrics in the text format, in steps."""
        state = self._engine.state
        rows = _Rows([], [])
        yield from _topics(state, topic, rows)
        yield from _groups(state, topic, group, rows)
        registry = CollectorRegistry()
        registry.register(rows)
        return generate_latest(registry)


class _Rows(Collector):
    def __init__(self, topics: list[TopicPartitionRow], groups: list[GroupPartitionRow]) -> None:
        self.topics, self.groups = topics, groups

    @property
    def full(self) -> bool:
        return 2 * (len(self.topics) + len(self.groups)) >= MAX_SERIES

    def collect(self) -> Iterator[Metric]:
        of_topic = ("topic", "partition")
        oldest = GaugeMetricFamily(
            "txmq_topic_partition_oldest_offset", "Offset of the oldest message", labels=of_topic
        )
        current = GaugeMetricFamily(
            "txmq_topic_partition_current_offset", "Offset of the next message", labels=of_topic
        )
        for row in self.topics:
            oldest.add_metric((row.topic, str(row.partition)), row.oldest)
            current.add_metric((row.topic, str(row.partition)), row.current)
        labels = ("consumergroup", "topic", "partition")
        position = GaugeMetricFamily(
            "txmq_consumergroup_current_offset",
            "Offset below which everything is settled",
            labels=labels,
        )
        lag = GaugeMetricFamily(
            "txmq_consumergroup_partition_lag", "Messages that are not processed", labels=labels
        )
        for place in self.groups:
            names = (place.group, place.topic, str(place.partition))
            position.add_metric(names, place.current)
            lag.add_metric(names, place.lag)
        cut = GaugeMetricFamily(
            "txmq_partition_metrics_cut", "1 if there are more series than these", int(self.full)
        )
        yield from (oldest, current, position, lag, cut)


def _topics(state: State, topic: str | None, rows: _Rows) -> Steps[None]:
    for name, one in list(state.topics.items()):
        if topic not in (None, name):
            continue
        for number in range(len(one.end_offsets)):
            if rows.full:
                return
            end = visibility.visible_end(state, one.topic_id, number)
            rows.topics.append(TopicPartitionRow(name, number, one.start_offsets[number], end))
            if number % PARTITIONS_PER_STEP == PARTITIONS_PER_STEP - 1:
                yield
        yield


def _groups(state: State, topic: str | None, group: str | None, rows: _Rows) -> Steps[None]:
    for one in list(state.groups.by_id.values()):
        if group not in (None, one.name):
            continue
        for number, (tp, position) in enumerate(list(one.positions.items())):
            if rows.full:
                return
            name = state.topics_by_id[tp[0]].name
            if topic in (None, name) and not state.topics_by_id[tp[0]].deleted:
                lag = progress.counts(state, one, tp).unprocessed
                rows.groups.append(GroupPartitionRow(one.name, name, tp[1], position.floor, lag))
            if number % PARTITIONS_PER_STEP == PARTITIONS_PER_STEP - 1:
                yield
        yield
