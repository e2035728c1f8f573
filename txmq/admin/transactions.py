"""Metrics of transactions: gauges read from the state when they are asked for, and
counters of what has happened.

Counters begin at 0 with the process, as Prometheus expects them to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from txmq.broker.alarms.alarms import RULES
from txmq.core.transactions import undecided
from txmq.core.transactions.listed import Kind
from txmq.core.transactions.model import get
from txmq.wire.calls_alarms import REPORTED_NAMES

if TYPE_CHECKING:
    from txmq.broker.service import Parts
    from txmq.model.message import Decision

SECOND = 1_000_000
LATENCIES = (
    0.001,
    0.005,
    0.02,
    0.1,
    0.5,
    2.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1_800.0,
    7_200.0,
)  # seconds
DECIDERS = frozenset(
    {"producer", "checker", "resolver", "operator", "job", "timeout", "xa-recovery"}
)  # the rest is "other"
COMMITTED, ROLLED_BACK = "COMMIT", "ROLLBACK"


class Tallies:
    """Counts what becomes of transactions (a `Watcher` of `broker.deciding`). No name
    from a message is a label.
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
            "Transactions decided, by the kind of whoever did it",
            ("outcome", "by"),
            registry=registry,
        )
        self._latency = Histogram(
            "txmq_decision_seconds",
            "From storing a transaction to its decision",
            buckets=LATENCIES,
            registry=registry,
        )
        self._conflicts = Counter(
            "txmq_conflicts", "Decisions that contradicted an earlier one", registry=registry
        )
        self._unresolvable = Counter(
            "txmq_no_resolver",
            "Transactions refused: no resolver leads to their database",
            registry=registry,
        )

    def checked(self, kind: str, answer: Decision) -> None:
        self._checks.labels(kind, answer.name).inc()

    def decided(self, outcome: Decision, by: str, after_us: int) -> None:
        self._decisions.labels(outcome.name, kind_of(by)).inc()
        self._latency.observe(after_us / SECOND)

    def job_decided(self, committed: int, rolled_back: int, by: str) -> None:
        self._decisions.labels(COMMITTED, kind_of(by)).inc(committed)
        self._decisions.labels(ROLLED_BACK, kind_of(by)).inc(rolled_back)

    def contradicted(self, by: str) -> None:
        del by
        self._conflicts.inc()

    def unresolvable(self) -> None:
        self._unresolvable.inc()


def kind_of(by: str) -> str:
    """Who decided, without the name: names are whatever clients say."""
    word = by.partition(" ")[0]
    return word if word in DECIDERS else "other"


class Standing(Collector):
    """How transactions, resolvers and alarms stand just now."""

    def __init__(self, parts: Parts) -> None:
        self._engine, self._resolving, self._alarms = parts.engine, parts.resolving, parts.alarms

    def collect(self) -> Iterator[Metric]:
        yield from self._transactions()
        yield from self._resolvers()
        yield from self._raised()

    def _transactions(self) -> Iterator[Metric]:
        state = self._engine.state
        gauges = {
            "undecided": ("without a decision", state.undecided),
            "in_doubt": (
                "undecided though asked about again and again",
                state.listed[Kind.IN_DOUBT],
            ),
            "waiting": (
                "committed, behind earlier tickets of their keys",
                state.listed[Kind.WAITING],
            ),
            "open": ("whose last part is missing", state.listed[Kind.OPEN]),
            "heuristic": (
                "decided by hand or found mixed, and not dealt with",
                state.listed[Kind.HEURISTIC],
            ),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"txmq_transactions_{name}", f"Transactions {meaning}", value)
        age = "Age of the oldest undecided transaction, 0 = there is none"
        yield GaugeMetricFamily(
            "txmq_transactions_oldest_undecided_seconds", age, self._oldest_age()
        )
        held = sum(state.holds.values())
        yield GaugeMetricFamily(
            "txmq_order_tickets", "Batches that keep or await their place in a key's order", held
        )

    def _oldest_age(self) -> float:
        token = next(undecided.tokens(self._engine.state), None)
        row = None if token is None else get(self._engine.state, token)
        return 0.0 if row is None else (self._engine.now() - row.stored_at) / SECOND

    def _resolvers(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "txmq_resolver_up", "Whether the database could be asked", labels=("resolver",)
        )
        seen = GaugeMetricFamily(
            "txmq_resolver_seen_timestamp_seconds",
            "When the database was last asked, 0 = never",
            labels=("resolver",),
        )
        for one in self._resolving.status():
            up.add_metric((one.name,), int(one.seen_at > 0 and not one.failing_since))
            seen.add_metric((one.name,), one.seen_at / SECOND)
        yield up
        yield seen

    def _raised(self) -> Iterator[Metric]:
        raised = {alarm.name for alarm in self._alarms.raised()}
        gauge = GaugeMetricFamily("txmq_alarm", "1 while the alarm is raised", labels=("name",))
        for name in (*(rule.name for rule in RULES), *REPORTED_NAMES):
            gauge.add_metric((name,), int(name in raised))
        yield gauge
