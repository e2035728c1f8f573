"""The metrics of a broker in the text format of Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from txmq.admin.metrics.access import AccessMetrics
from txmq.admin.metrics.broker import BrokerMetrics
from txmq.admin.metrics.groups import GroupMetrics
from txmq.admin.metrics.throttling import ThrottleMetrics
from txmq.admin.metrics.transactions import DecisionCounters, TransactionGauges
from txmq.core.steps import Steps, run_to_end

if TYPE_CHECKING:
    from txmq.broker.service import BrokerParts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of a broker, summed up for each topic and group."""

    def __init__(self, parts: BrokerParts) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(BrokerMetrics(parts.engine, parts.settings.broker.name))
        self._groups = GroupMetrics(parts.engine, parts.paces)
        self._registry.register(self._groups)
        self._registry.register(TransactionGauges(parts))
        parts.listeners.all.append(DecisionCounters(self._registry))
        self._registry.register(AccessMetrics(parts.guard, parts.engine))
        self._registry.register(ThrottleMetrics(parts))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return the metrics in the text format."""
        return run_to_end(self.steps())

    def steps(self) -> Steps[bytes]:
        """Return the metrics in the text format, in steps."""
        yield from self._groups.sample()
        return generate_latest(self._registry)
