"""Metrics of what the broker throttles. No name of a user is a label."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from txmq.broker.service import BrokerParts


class ThrottleMetrics(Collector):
    """Counts since the start of the broker, and what waits now."""

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
