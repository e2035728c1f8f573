"""Metrics of transactions: gauges read from the state, and counters of events.

Counters start at 0 with the process, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from txmq.broker.monitoring.alarm_rules import ALARM_RULES
from txmq.core.transactions import indexes
from txmq.core.transactions.indexes import ListKind
from txmq.core.transactions.model import get
from txmq.model.units import SECOND
from txmq.wire.calls.alarms import REPORTED_NAMES

if TYPE_CHECKING:
    from txmq.broker.service import BrokerParts
    from txmq.model.message import Decision

LATENCY_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 7_200.0)
# the first words of "by" that are labels; all others become "other"
DECIDERS = frozenset(
    {"producer", "checker", "resolver", "operator", "job", "timeout", "xa-recovery"}
)
COMMITTED, ROLLED_BACK = "COMMIT", "ROLLBACK"


class DecisionCounters:
    """Counters of decisions: a listener of the check-back services. No name from a
    message is a label.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._checks = Counter(
            "txmq_checks",
            "Answers to check-backs, by the kind of decider",
            ("kind", "answer"),
            registry=registry,
        )
        self._decisions = Counter(
            "txmq_decisions",
            "Transactions decided, by outcome and kind of decider",
            ("outcome", "by"),
            registry=registry,
        )
        self._latency = Histogram(
            "txmq_decision_seconds",
            "Time from the storage of a transaction to its decision",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._conflicts = Counter(
            "txmq_conflicts",
            "Decisions refused because they contradict an earlier one",
            registry=registry,
        )
        self._unresolvable = Counter(
            "txmq_no_resolver",
            "Transactions refused because no resolver knows their database",
            registry=registry,
        )

    def checked(self, kind: str, answer: Decision) -> None:
        self._checks.labels(kind, answer.name).inc()

    def decided(self, outcome: Decision, by: str, after_us: int) -> None:
        self._decisions.labels(outcome.name, decider_kind(by)).inc()
        self._latency.observe(after_us / SECOND)

    def job_decided(self, committed: int, rolled_back: int, by: str) -> None:
        self._decisions.labels(COMMITTED, decider_kind(by)).inc(committed)
        self._decisions.labels(ROLLED_BACK, decider_kind(by)).inc(rolled_back)

    def contradicted(self, by: str) -> None:
        del by
        self._conflicts.inc()

    def unresolvable(self) -> None:
        self._unresolvable.inc()


def decider_kind(by: str) -> str:
    """Return the kind of decider, without the name that a client chose."""
    word = by.partition(" ")[0]
    return word if word in DECIDERS else "other"


class TransactionGauges(Collector):
    """Current numbers of transactions, resolvers and alarms."""

    def __init__(self, parts: BrokerParts) -> None:
        self._engine, self._alarms = parts.engine, parts.alarms
        self._resolvers = parts.resolvers

    def collect(self) -> Iterator[Metric]:
        yield from self._transactions()
        yield from self._resolver_health()
        yield from self._alarms_raised()

    def _transactions(self) -> Iterator[Metric]:
        state = self._engine.state
        gauges = {
            "undecided": ("without a decision", state.undecided),
            "in_doubt": (
                "in doubt: undecided after many check-backs",
                state.listed[ListKind.IN_DOUBT],
            ),
            "waiting": (
                "committed, but waiting behind earlier ones of their keys",
                state.listed[ListKind.WAITING],
            ),
            "open": ("without their last part", state.listed[ListKind.OPEN]),
            "heuristic": (
                "decided by hand or mixed, and not forgotten by an operator",
                state.listed[ListKind.HEURISTIC],
            ),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"txmq_transactions_{name}", f"Transactions {meaning}", value)
        meaning = "Age of the oldest undecided transaction, 0 without any"
        yield GaugeMetricFamily(
            "txmq_transactions_oldest_undecided_seconds", meaning, self._oldest_age()
        )
        held = sum(state.held_keys.values())
        yield GaugeMetricFamily(
            "txmq_order_tickets", "Batches that hold or await their place in a key's order", held
        )

    def _oldest_age(self) -> float:
        token = next(indexes.undecided_tokens(self._engine.state), None)
        row = None if token is None else get(self._engine.state, token)
        return 0.0 if row is None else (self._engine.now() - row.stored_at) / SECOND

    def _resolver_health(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "txmq_resolver_up",
            "1 if the last check-back reached the database",
            labels=("resolver",),
        )
        seen = GaugeMetricFamily(
            "txmq_resolver_seen_timestamp_seconds",
            "Time of the last check-back, 0 before the first",
            labels=("resolver",),
        )
        for one in self._resolvers.status():
            up.add_metric((one.name,), int(one.seen_at > 0 and not one.failing_since))
            seen.add_metric((one.name,), one.seen_at / SECOND)
        yield up
        yield seen

    def _alarms_raised(self) -> Iterator[Metric]:
        raised = {(alarm.name, alarm.severity) for alarm in self._alarms.raised()}
        usual = {(rule.name, rule.severity) for rule in ALARM_RULES}
        reported = {(name, "critical") for name in REPORTED_NAMES}
        gauge = GaugeMetricFamily(
            "txmq_alarm", "1 while the alarm is raised", labels=("name", "severity")
        )
        for one in sorted(raised | usual | reported):
            gauge.add_metric(one, int(one in raised))
        yield gauge
