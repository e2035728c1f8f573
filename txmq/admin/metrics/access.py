"""Metrics of logins and denials. No name of a user or resource is a label."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from txmq.model.access import ALL_VERBS

if TYPE_CHECKING:
    from txmq.broker.access.guard import Guard
    from txmq.broker.engine.engine import Engine


class AccessMetrics(Collector):
    """Counts since the start of the broker."""

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
