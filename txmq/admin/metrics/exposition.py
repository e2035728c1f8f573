"""The metrics of a broker in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from txmq.admin.metrics.broker import BrokerMetrics, CertificateMetrics, LogMetrics
from txmq.admin.metrics.cluster import ClusterMetrics
from txmq.admin.metrics.groups import GroupMetrics
from txmq.admin.metrics.transactions import DecisionCounters, TransactionGauges
from txmq.core.steps import Steps, run_to_end
from txmq.model.access import ALL_VERBS

if TYPE_CHECKING:
    from txmq.broker.access.guard import Guard
    from txmq.broker.engine.engine import Engine
    from txmq.broker.service import BrokerParts, FollowerParts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of a broker, summed up for each topic and group."""

    def __init__(self, parts: BrokerParts) -> None:
        self._registry = _of_process(parts)
        self._registry.register(BrokerMetrics(parts.engine))
        self._groups = GroupMetrics(parts.engine, parts.paces)
        self._registry.register(self._groups)
        self._registry.register(TransactionGauges(parts))
        parts.listeners.all.append(DecisionCounters(self._registry))
        self._registry.register(AccessMetrics(parts.guard, parts.engine))
        self._registry.register(ThrottleMetrics(parts))
        if parts.cluster is not None:
            self._registry.register(ClusterMetrics(parts.cluster))

    def text(self) -> bytes:
        """Return the metrics in the text format."""
        return run_to_end(self.steps())

    def steps(self) -> Steps[bytes]:
        """Return the metrics in the text format, in steps."""
        yield from self._groups.sample()
        return generate_latest(self._registry)


class FollowerMetrics:
    """The metrics of a node that follows."""

    def __init__(self, parts: FollowerParts) -> None:
        self._registry = _of_process(parts)
        self._registry.register(ClusterMetrics(parts.cluster))

    def text(self) -> bytes:
        """Return the metrics in the text format."""
        return generate_latest(self._registry)


def _of_process(parts: BrokerParts | FollowerParts) -> CollectorRegistry:
    """Return what a broker and a node that follows have both."""
    registry = CollectorRegistry()
    registry.register(LogMetrics(parts.engine, parts.settings.broker.name))
    if parts.certificates is not None:
        registry.register(CertificateMetrics(parts.certificates))
    ProcessCollector(registry=registry)
    return registry


class AccessMetrics(Collector):
    """Logins and denials since the broker's start. No name of a user is a label."""

    def __init__(self, guard: Guard, engine: Engine) -> None:
        self._guard, self._engine = guard, engine

    def collect(self) -> Iterator[Metric]:
        denied = CounterMetricFamily(
            "txmq_access_denied", "Requests that a user may not make, by verb", labels=("verb",)
        )
        for verb in ALL_VERBS:
            denied.add_metric((verb,), self._guard.denied[verb])
        yield denied
        logins = CounterMetricFamily("txmq_logins", "Logins, by outcome", labels=("outcome",))
        for outcome in ("succeeded", "failed"):
            logins.add_metric((outcome,), self._guard.logins[outcome])
        yield logins
        yield GaugeMetricFamily(
            "txmq_users",
            "Users; without any, nobody logs in",
            len(self._engine.state.users.by_name),
        )


class ThrottleMetrics(Collector):
    """Requests that the broker has throttled since its start, and those that wait."""

    def __init__(self, parts: BrokerParts) -> None:
        self._engine, self._sends = parts.engine, parts.sends
        self._guard, self._paces = parts.guard, parts.paces

    def collect(self) -> Iterator[Metric]:
        sends = self._sends
        requests = CounterMetricFamily(
            "txmq_throttled_requests",
            "Requests that waited, or were refused for a while, by reason",
            labels=("reason", "outcome"),
        )
        requests.add_metric(("disk", "waited"), sends.requests)
        requests.add_metric(("disk", "refused"), sends.refused)
        meters = list(self._guard.meters.values())
        refused = sum(meter.refused.total() for meter in meters)
        requests.add_metric(("quota", "refused"), refused)
        paces = {} if self._paces is None else self._paces.view()
        waited = sum(sum(waits.values()) for waits in paces.values())
        requests.add_metric(("group", "waited"), waited)
        yield requests
        seconds = CounterMetricFamily(
            "txmq_throttled_seconds",
            "Seconds that requests waited, or were told to wait, by reason",
            labels=("reason",),
        )
        seconds.add_metric(("disk",), sends.seconds)
        seconds.add_metric(("quota",), sum(meter.seconds for meter in meters))
        yield seconds
        yield GaugeMetricFamily(
            "txmq_sends_waiting", "Sends and half messages that wait for the disk", sends.waiting
        )
        yield GaugeMetricFamily(
            "txmq_sends_waiting_bytes", "Bytes of sends that wait for the disk", sends.bytes
        )
        yield GaugeMetricFamily(
            "txmq_unflushed_budget_bytes",
            "Bytes that may be on their way to the disk before sends wait",
            self._engine.budget.bytes,
        )
