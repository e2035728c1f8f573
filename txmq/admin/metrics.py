"""What Prometheus gets: numbers read from the engine's state when it asks.

Labels are names of topics and groups, the first `MOST_NAMES` of each; broadcast members
count for their group. Nothing that comes with messages becomes a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from txmq.admin.transactions import Standing, Tallies
from txmq.core.consumers import queries
from txmq.core.state import visibility
from txmq.store.latency import BOUNDS_US

if TYPE_CHECKING:
    from txmq.broker.engine import Engine
    from txmq.broker.service import Parts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_NAMES = 500  # series of one metric: a server of Prometheus keeps each in memory
GROUP_GAUGES = {
    "lag": "Messages neither processed nor moved",
    "leased": "Messages out at members",
    "retrying": "Messages that wait for another delivery",
    "parked": "Messages that wait behind the fence of their key",
    "fences": "Keys with a fence",
    "letters": "Open dead letters",
    "floods": "Times that the group was guarded, because many keys failed alike",
    "expired": "Messages whose time to live was over before they were delivered",
    "members": "Members",
}


class Metrics:
    """The text of all metrics."""

    def __init__(self, parts: Parts) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(parts.engine, parts.settings.broker.name))
        self._registry.register(Standing(parts))
        parts.watching.watchers.append(Tallies(self._registry))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """In the text format."""
        return generate_latest(self._registry)


class _State(Collector):
    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name

    def collect(self) -> Iterator[Metric]:
        yield from self._broker()
        yield from self._topics()
        yield from self._groups()

    def _broker(self) -> Iterator[Metric]:
        store = self._engine.store
        told = GaugeMetricFamily(
            "txmq_broker_info", "Which broker and which log this is", labels=("name", "log_id")
        )
        told.add_metric((self._name, str(store.log_id)), 1)
        yield told
        yield GaugeMetricFamily(
            "txmq_boot_epoch", "How often the broker has started", self._engine.state.boot_epoch
        )
        yield GaugeMetricFamily("txmq_log_end_bytes", "Position after the last record", store.end)
        yield GaugeMetricFamily(
            "txmq_log_durable_bytes", "Position up to which the log is on disk", store.durable
        )
        yield GaugeMetricFamily("txmq_log_segments", "Segments of the log", len(store.segments()))
        latencies = store.latencies
        buckets = zip(
            [*(str(bound / 1e6) for bound in BOUNDS_US), "+Inf"],
            accumulate(latencies.counts),
            strict=True,
        )
        told_flushes = HistogramMetricFamily(
            "txmq_flush_seconds", "How long writes took until they were on disk"
        )
        told_flushes.add_metric((), list(buckets), latencies.total_us / 1e6)
        yield told_flushes
        waiting = self._engine.state.delayed
        yield GaugeMetricFamily(
            "txmq_delayed_messages", "Messages that wait for their time of delivery", waiting
        )
        disk = self._engine.disk
        yield GaugeMetricFamily(
            "txmq_log_read_only",
            "1 while writes are refused",
            int(store.read_only or disk.refusing),
        )
        if disk.space is not None:
            yield GaugeMetricFamily(
                "txmq_disk_bytes", "Size of the disk that the log is on", disk.space.size
            )
            yield GaugeMetricFamily("txmq_disk_free_bytes", "What is left of it", disk.space.free)

    def _topics(self) -> Iterator[Metric]:
        topics = self._engine.state.topics
        yield GaugeMetricFamily("txmq_topics", "Topics", len(topics))
        messages = CounterMetricFamily(
            "txmq_topic_messages", "Messages published", labels=("topic",)
        )
        partitions = GaugeMetricFamily("txmq_topic_partitions", "Partitions", labels=("topic",))
        kept = GaugeMetricFamily(
            "txmq_topic_bytes", "Bytes of messages that are kept", labels=("topic",)
        )
        stored = CounterMetricFamily(
            "txmq_topic_stored_bytes", "Bytes published since the start", labels=("topic",)
        )
        for name, topic in list(topics.items())[:MOST_NAMES]:
            ends = (
                visibility.end(self._engine.state, topic.topic_id, n)
                for n in range(len(topic.ends))
            )
            messages.add_metric((name,), sum(ends))
            partitions.add_metric((name,), len(topic.ends))
            kept.add_metric((name,), sum(topic.sizes))
            stored.add_metric((name,), topic.stored)
        yield from (messages, partitions, kept, stored)

    def _groups(self) -> Iterator[Metric]:
        groups = queries.groups(self._engine.state, self._engine.now())
        yield GaugeMetricFamily(
            "txmq_groups", "Consumer groups, members of broadcast groups included", len(groups)
        )
        for field, meaning in GROUP_GAUGES.items():
            gauge = GaugeMetricFamily(f"txmq_group_{field}", meaning, labels=("group",))
            for name, value in list(_by_group(groups, field).items())[:MOST_NAMES]:
                gauge.add_metric((name,), value)
            yield gauge
        ages: dict[str, int] = {}
        for group in groups:
            name = group["group"].partition("@")[0]
            ages[name] = max(ages.get(name, 0), group["lag_ms"])
        oldest = GaugeMetricFamily(
            "txmq_group_lag_seconds", "Age of the oldest message not done with", labels=("group",)
        )
        for name, age in list(ages.items())[:MOST_NAMES]:
            oldest.add_metric((name,), age / 1_000)
        yield oldest


def _by_group(groups: Iterable[dict[str, Any]], field: str) -> Counter[str]:
    values: Counter[str] = Counter()
    for group in groups:
        values[group["group"].partition("@")[0]] += group[field]
    return values
