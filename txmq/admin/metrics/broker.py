"""Metrics of the broker itself: its log, its disk, and its replay plans.

A node of a cluster that follows has those of its log and its disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from txmq.core.state.plans import LetterOutcome, PlanState
from txmq.model.units import SECOND
from txmq.store.log.latency import BOUNDS_US

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine


class LogMetrics(Collector):
    """Gauges of log and disk."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name

    def collect(self) -> Iterator[Metric]:
        yield from self._log()
        yield from self._disk()

    def _log(self) -> Iterator[Metric]:
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

    def _disk(self) -> Iterator[Metric]:
        disk = self._engine.disk
        yield GaugeMetricFamily(
            "txmq_log_read_only",
            "1 while writes are refused",
            int(self._engine.store.read_only or disk.refusing),
        )
        if disk.space is not None:
            yield GaugeMetricFamily(
                "txmq_disk_bytes", "Size of the disk of the log", disk.space.size
            )
            yield GaugeMetricFamily(
                "txmq_disk_free_bytes", "Free space on the disk of the log", disk.space.free
            )


class BrokerMetrics(Collector):
    """The histogram of flushes, delayed messages, and the progress of plans."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield self._flushes()
        yield GaugeMetricFamily(
            "txmq_delayed_messages",
            "Delayed messages that are not due",
            self._engine.state.delayed_count,
        )
        yield from self._plans()

    def _flushes(self) -> Metric:
        latencies = self._engine.store.latencies
        buckets = zip(
            [*(str(bound / SECOND) for bound in BOUNDS_US), "+Inf"],
            accumulate(latencies.counts),
            strict=True,
        )
        flushes = HistogramMetricFamily(
            "txmq_flush_seconds", "Time from a write until it was on disk"
        )
        flushes.add_metric((), list(buckets), latencies.total_us / SECOND)
        return flushes

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
