"""Metrics for Prometheus, read from the state of the engine at each scrape.

Labels are names of topics and groups, the first `MAX_NAMES` of each. Members of a
broadcast group count for their group. Nothing in messages becomes a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from txmq.admin.transactions import DecisionCounters, TransactionGauges
from txmq.core.consumers.group_views import summarize
from txmq.core.state import visibility
from txmq.core.state.plans import LetterOutcome, PlanState
from txmq.core.steps import Steps, run_to_end
from txmq.model.units import SECOND
from txmq.store.log.latency import BOUNDS_US

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine
    from txmq.broker.service import BrokerParts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_NAMES = 500  # per metric, because Prometheus keeps each series in memory
GROUP_GAUGES = {
    "lag": "Messages that are not settled",
    "leased": "Messages leased to members",
    "retrying": "Failed messages that wait for a retry",
    "parked": "Messages parked behind the fence of their key",
    "fences": "Keys with a fence",
    "letters": "Open dead letters",
    "at_consumers": "Failed messages in local stores of consumers",
    "store_attempts": "Failed attempts of the messages in local stores of consumers",
    "stores": "Local stores of consumers that have messages",
    "stores_lost": "Local stores of consumers that have messages, and no owner",
    "floods": "Times that the group was guarded, because many keys failed with one error",
    "expired": "Messages that expired before their delivery",
    "members": "Members of the group",
}


class Metrics:
    """All metrics of a broker."""

    def __init__(self, parts: BrokerParts) -> None:
        self._registry = CollectorRegistry()
        self._state = _StateCollector(parts.engine, parts.settings.broker.name)
        self._registry.register(self._state)
        self._registry.register(TransactionGauges(parts))
        parts.listeners.all.append(DecisionCounters(self._registry))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return the metrics in the text format."""
        return run_to_end(self.steps())

    def steps(self) -> Steps[bytes]:
        """Return the metrics in the text format, in steps."""
        yield from self._state.sample()
        return generate_latest(self._registry)


class _StateCollector(Collector):
    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._messages: dict[str, int] = {}  # published, by topic
        self._group_views: list[dict[str, Any]] = []

    def sample(self) -> Steps[None]:
        """Read what takes long."""
        state = self._engine.state
        messages: dict[str, int] = {}
        for name, topic in list(islice(state.topics.items(), MAX_NAMES)):
            messages[name] = 0
            for number in range(len(topic.end_offsets)):
                messages[name] += visibility.visible_end(state, topic.topic_id, number)
                if number % 64 == 63:
                    yield
            yield
        groups: list[dict[str, Any]] = []
        for group in list(state.groups.by_id.values()):
            summary = yield from summarize(state, group, self._engine.now())
            groups.append(summary)
        self._messages, self._group_views = messages, groups

    def collect(self) -> Iterator[Metric]:
        yield from self._broker()
        yield from self._topics()
        yield from self._groups()
        yield from self._plans()

    def _plans(self) -> Iterator[Metric]:
        """Yield the progress of unfinished plans, whose number is bounded."""
        letters = GaugeMetricFamily(
            "txmq_plan_letters",
            "Letters of an unfinished replay plan, by outcome",
            labels=("plan", "group", "outcome"),
        )
        paused = GaugeMetricFamily(
            "txmq_plan_paused", "1 while a replay plan is paused", labels=("plan", "group")
        )
        for plan in self._engine.state.plans.active.values():
            if not plan.unfinished:
                continue
            for outcome in LetterOutcome:
                names = (plan.name, plan.group, outcome.name.lower())
                letters.add_metric(names, plan.count(outcome))
            paused.add_metric((plan.name, plan.group), int(plan.state is PlanState.PAUSED))
        yield from (letters, paused)

    def _broker(self) -> Iterator[Metric]:
        store = self._engine.store
        info = GaugeMetricFamily(
            "txmq_broker_info", "Name of the broker and id of its log", labels=("name", "log_id")
        )
        info.add_metric((self._name, str(store.log_id)), 1)
        yield info
        yield GaugeMetricFamily(
            "txmq_boot_epoch", "Number of starts of the broker", self._engine.state.boot_epoch
        )
        yield GaugeMetricFamily(
            "txmq_log_end_bytes", "Position after the last record of the log", store.end
        )
        yield GaugeMetricFamily(
            "txmq_log_durable_bytes", "Position up to which the log is on disk", store.durable
        )
        yield GaugeMetricFamily("txmq_log_segments", "Segments of the log", len(store.segments()))
        latencies = store.latencies
        buckets = zip(
            [*(str(bound / SECOND) for bound in BOUNDS_US), "+Inf"],
            accumulate(latencies.counts),
            strict=True,
        )
        flushes = HistogramMetricFamily(
            "txmq_flush_seconds", "Time from a write until it was on disk"
        )
        flushes.add_metric((), list(buckets), latencies.total_us / SECOND)
        yield flushes
        waiting = self._engine.state.delayed_count
        yield GaugeMetricFamily(
            "txmq_delayed_messages", "Delayed messages that are not due", waiting
        )
        disk = self._engine.disk
        yield GaugeMetricFamily(
            "txmq_log_read_only",
            "1 while writes are refused",
            int(store.read_only or disk.refusing),
        )
        if disk.space is not None:
            yield GaugeMetricFamily(
                "txmq_disk_bytes", "Size of the disk of the log", disk.space.size
            )
            yield GaugeMetricFamily(
                "txmq_disk_free_bytes", "Free space on the disk of the log", disk.space.free
            )

    def _topics(self) -> Iterator[Metric]:
        topics = self._engine.state.topics
        yield GaugeMetricFamily("txmq_topics", "Topics", len(topics))
        messages = CounterMetricFamily(
            "txmq_topic_messages", "Messages published", labels=("topic",)
        )
        partitions = GaugeMetricFamily("txmq_topic_partitions", "Partitions", labels=("topic",))
        kept = GaugeMetricFamily(
            "txmq_topic_bytes", "Bytes of messages that are retained", labels=("topic",)
        )
        stored = CounterMetricFamily(
            "txmq_topic_stored_bytes", "Bytes published since the start", labels=("topic",)
        )
        for name, published in self._messages.items():
            topic = topics.get(name)
            if topic is None:  # deleted meanwhile
                continue
            messages.add_metric((name,), published)
            partitions.add_metric((name,), len(topic.end_offsets))
            kept.add_metric((name,), sum(topic.partition_bytes))
            stored.add_metric((name,), topic.published_bytes)
        yield from (messages, partitions, kept, stored)

    def _groups(self) -> Iterator[Metric]:
        groups = sorted(self._group_views, key=lambda view: str(view["group"]))
        yield GaugeMetricFamily(
            "txmq_groups", "Consumer groups, members of broadcast groups included", len(groups)
        )
        for field, meaning in GROUP_GAUGES.items():
            gauge = GaugeMetricFamily(f"txmq_group_{field}", meaning, labels=("group",))
            for name, value in list(_by_group(groups, field).items())[:MAX_NAMES]:
                gauge.add_metric((name,), value)
            yield gauge
        ages: dict[str, int] = {}
        for group in groups:
            name = group["group"].partition("@")[0]
            ages[name] = max(ages.get(name, 0), group["lag_ms"])
        oldest = GaugeMetricFamily(
            "txmq_group_lag_seconds", "Age of the oldest unsettled message", labels=("group",)
        )
        for name, age in list(ages.items())[:MAX_NAMES]:
            oldest.add_metric((name,), age / 1_000)
        yield oldest
        yield self._oldest_stored(groups)

    def _oldest_stored(self, groups: Iterable[dict[str, Any]]) -> Metric:
        now, ages = self._engine.now(), dict[str, float]()
        for group in groups:
            name, since = group["group"].partition("@")[0], group["oldest_stored"]
            if since is not None:
                ages[name] = max(ages.get(name, 0.0), max(0, now - since) / SECOND)
        gauge = GaugeMetricFamily(
            "txmq_group_oldest_stored_seconds",
            "Time since the first failure of a message in a local store of a consumer",
            labels=("group",),
        )
        for name, age in list(ages.items())[:MAX_NAMES]:
            gauge.add_metric((name,), age)
        return gauge


def _by_group(groups: Iterable[dict[str, Any]], field: str) -> Counter[str]:
    values: Counter[str] = Counter()
    for group in groups:
        values[group["group"].partition("@")[0]] += group[field]
    return values
