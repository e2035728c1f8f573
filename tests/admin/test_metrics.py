"""Metrics of transactions, resolvers and alarms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet.task import Clock

from tests.broker.calls.test_plan_calls import Desk
from tests.broker.support import BrokerInMemory, FakeNode, FakeResolver, parts_of
from txmq.admin.metrics import groups, partitions
from txmq.admin.metrics.cluster import ClusterMetrics
from txmq.admin.metrics.exposition import Metrics
from txmq.admin.metrics.groups import GroupMetrics
from txmq.admin.metrics.partitions import PartitionMetrics
from txmq.admin.metrics.transactions import decider_kind
from txmq.broker.checkback.resolvers import ResolverStatus
from txmq.broker.delivery.group_paces import GroupPaces
from txmq.broker.monitoring.alarm_rules import ALARM_RULES
from txmq.config.broker import SettingsFile
from txmq.core.consumers.commands import JoinGroup
from txmq.core.replay.orders import CancelPlan, CreatePlan
from txmq.core.state.plans import LetterOutcome
from txmq.core.steps import run_to_end
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.jobs import DecideJob
from txmq.core.transactions.xa import DecideByHand
from txmq.model.decider import ByHome, ByJob
from txmq.model.message import Decision, Message
from txmq.model.units import SECOND

SETTINGS = SettingsFile.model_validate(
    {
        "broker": {"data": "/data"},
        "checks": {"first_s": 6.0, "then_s": 10.0, "longest_s": 10.0, "in_doubt_after": 1},
    }
)


class MetricsBroker:
    """A broker and its metrics."""

    def __init__(self) -> None:
        self.oracle = FakeResolver()
        self.broker = broker = BrokerInMemory(self.oracle, SETTINGS)
        broker.start()
        self._metrics = Metrics(parts_of(broker, SETTINGS, self.oracle))

    def half(self, number: int, key: str = "k", **options: Any) -> bytes:
        return bytes.fromhex(self.broker.half(number, Message(b"m", key), **options))

    def decide(self, token: bytes, outcome: Decision, by: str) -> None:
        self.broker.do(DecideTransaction(token, outcome, by))

    def series(self) -> Counter[tuple[str, str]]:
        """Return the number of series, by metric and the names of its labels."""
        return Counter(
            (sample.name, ",".join(sorted(sample.labels)))
            for family in text_string_to_metric_families(self._metrics.text().decode())
            for sample in family.samples
            if not sample.name.endswith("_created")
        )

    def value(self, name: str, /, **labels: str) -> float:
        """Of a sample, 0 = there is none."""
        found = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self._metrics.text().decode())
            for sample in family.samples
        }
        return found.get((name, tuple(sorted(labels.items()))), 0.0)


@pytest.fixture
def desk() -> MetricsBroker:
    return MetricsBroker()


def test_a_leader_tells_of_its_followers_and_a_follower_of_itself() -> None:
    node = FakeNode()
    [follower] = node.others
    node.others = [follower._replace(lag_bytes=70, lag_s=1.5)]

    def values() -> dict[str, float]:
        samples = [one for metric in ClusterMetrics(node).collect() for one in metric.samples]
        assert all(one.labels in ({}, {"node": "n2"}) for one in samples)
        return {one.name.removeprefix("txmq_cluster_"): one.value for one in samples}

    own = {"leader": 1, "epoch": 3, "heard_seconds": 0.1, "claims_total": 4}
    assert values() == {
        **own, "unconfirmed_seconds": 0.2, "questions_total": 5, "followers": 1, "lag_bytes": 70,
        "lag_seconds": 1.5,
    }  # fmt: skip
    node.figures = node.figures._replace(leads=False)
    assert values() == {**own, "leader": 0}


def test_a_broker_alone_has_no_metrics_of_a_cluster(desk: MetricsBroker) -> None:
    assert not [name for name, _labels in desk.series() if name.startswith("txmq_cluster")]


def test_unfinished_plans_tell_their_progress(desk: MetricsBroker) -> None:
    desk.broker.do(CreateTopic("t", 1))
    desk.broker.do(JoinGroup("g", "m", "i", "concurrent", ("t",)))
    desk.broker.do(CreatePlan("p", "g"))
    plan = desk.broker.engine.state.plans.by_name["p"]
    plan.counts[LetterOutcome.PROCESSED] = 3
    labels = {"plan": "p", "group": "g"}
    assert desk.value("txmq_plan_letters", **labels, outcome="processed") == 3
    assert desk.value("txmq_plan_paused", **labels) == 0
    desk.broker.do(CancelPlan("p"))
    assert desk.value("txmq_plan_letters", **labels, outcome="processed") == 0


def test_a_group_tells_an_outage_and_the_letters_that_wait_for_an_export() -> None:
    desk = Desk()
    desk.ask("group.alter", group="g", keep_until_exported=True, operator="ada")

    def values() -> dict[str, float]:
        metrics = GroupMetrics(desk.broker.engine)
        run_to_end(metrics.sample())
        samples = [sample for metric in metrics.collect() for sample in metric.samples]
        return {one.name: one.value for one in samples if one.labels == {"group": "g"}}

    before = values()
    assert before["txmq_group_letters_until_exported"] == 40
    assert before["txmq_group_outage_partitions"] == 0
    desk.ask("dlq.exported", group="g", letters=[["t", 0, 0, 1, 0]], operator="ada")
    assert values()["txmq_group_letters_until_exported"] == 39
    desk.plan()  # all of them wait for the group
    after = values()
    assert after["txmq_group_outage_partitions"] == 1
    assert after["txmq_group_poison_partitions"] == 0
    assert after["txmq_group_standing_unprocessed"] == 40


def test_groups_tell_the_bytes_that_were_sent_to_them() -> None:
    desk = Desk()
    engine = desk.broker.engine
    paces = GroupPaces(engine, Clock())
    for group, size in (("g", 300), ("g", 200), ("deleted since", 5)):
        paces.note_sent(group, size)
    metrics = GroupMetrics(engine, paces)
    [family] = [one for one in metrics.collect() if one.name == "txmq_group_sent_bytes"]
    assert [(one.labels, one.value) for one in family.samples] == [({"group": "g"}, 500)]


def test_the_number_of_series_is_bounded(
    desk: MetricsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "MAX_NAMES", 3)
    monkeypatch.setattr(groups, "MAX_PAIRS", 5)
    monkeypatch.setattr(partitions, "MAX_SERIES", 12)
    topics = tuple(f"t{number}" for number in range(6))
    for name in topics:
        desk.broker.do(CreateTopic(name, 2))
        desk.broker.do(JoinGroup(f"g-{name}", "m", "i", "concurrent", topics[:2]))
    series = desk.series()
    most = {"topic": 3, "group": 3, "consumergroup,topic": 5}
    found = {
        labels: {count for (_, by), count in series.items() if by == labels} for labels in most
    }
    assert found == {labels: {number} for labels, number in most.items()}
    of_partitions = run_to_end(PartitionMetrics(desk.broker.engine).steps(None, None)).decode()
    assert "txmq_partition_metrics_cut 1.0" in of_partitions
    assert of_partitions.count('partition="') == 12


def test_transactions_are_counted_by_how_they_stand(desk: MetricsBroker) -> None:
    first, second = desk.half(1), desk.half(2, check_after=0)
    desk.half(3, sealed=False, check_after=0)
    desk.decide(second, Decision.COMMIT, "producer shop")
    desk.broker.pass_time(7)
    desk.oracle.answer(first, Decision.UNKNOWN, "in progress")
    home = desk.half(4, "other", decider=ByHome(b"l" * 16, b"t" * 16), check_after=0)
    desk.broker.do(
        DecideByHand(home, Decision.ROLLBACK, "ada", "gone", desk.broker.log.log_id.bytes)
    )
    stands = {"undecided": 2, "waiting": 1, "open": 1, "in_doubt": 1, "heuristic": 1}
    assert {name: desk.value(f"txmq_transactions_{name}") for name in stands} == stands
    assert desk.value("txmq_transactions_oldest_undecided_seconds") == 7
    assert desk.value("txmq_order_tickets") == 3
    desk.broker.pass_time(20)
    desk.oracle.answer(first, Decision.ROLLBACK)
    stands = {"undecided": 1, "waiting": 0, "open": 1, "in_doubt": 0, "heuristic": 1}
    assert {name: desk.value(f"txmq_transactions_{name}") for name in stands} == stands
    assert desk.value("txmq_transactions_oldest_undecided_seconds") == 27


def test_decisions_are_counted_by_outcome_and_by_whom_with_their_latency(
    desk: MetricsBroker,
) -> None:
    tokens = [desk.half(number, str(number), check_after=0) for number in range(4)]
    desk.decide(tokens[0], Decision.COMMIT, "producer shop")
    desk.broker.pass_time(1)
    desk.decide(tokens[1], Decision.COMMIT, "producer another shop")
    desk.decide(tokens[2], Decision.ROLLBACK, "resolver shop")
    desk.decide(tokens[3], Decision.ROLLBACK, "stranger")
    desk.decide(tokens[3], Decision.ROLLBACK, "stranger")
    assert desk.value("txmq_decisions_total", outcome="COMMIT", by="producer") == 2
    assert desk.value("txmq_decisions_total", outcome="ROLLBACK", by="resolver") == 1
    assert desk.value("txmq_decisions_total", outcome="ROLLBACK", by="other") == 1
    assert (desk.value("txmq_decision_seconds_count"), desk.value("txmq_decision_seconds_sum")) == (
        4,
        3,
    )
    assert desk.value("txmq_decision_seconds_bucket", le="0.001") == 1
    assert desk.value("txmq_decision_seconds_bucket", le="2.0") == 4


def test_a_job_s_decisions_are_counted_one_by_one(desk: MetricsBroker) -> None:
    tokens = [desk.half(number, decider=ByJob(b"j" * 16)) for number in range(3)]
    desk.broker.do(DecideJob(b"j" * 16, Decision.COMMIT, tuple(tokens[:2]), "job"))
    assert desk.value("txmq_decisions_total", outcome="COMMIT", by="job") == 2
    assert desk.value("txmq_decisions_total", outcome="ROLLBACK", by="job") == 1


def test_answers_conflicts_and_refusals_are_counted(desk: MetricsBroker) -> None:
    token = desk.half(1)
    for answer in (Decision.UNKNOWN, Decision.UNKNOWN, Decision.COMMIT):
        desk.broker.pass_time(11)
        desk.oracle.answer(token, answer)
    desk.decide(token, Decision.ROLLBACK, "producer shop")
    desk.broker.assembly.listeners.unresolvable()
    assert desk.value("txmq_checks_total", kind="postgres", answer="UNKNOWN") == 2
    assert desk.value("txmq_checks_total", kind="postgres", answer="COMMIT") == 1
    assert desk.value("txmq_conflicts_total") == 1
    assert desk.value("txmq_no_resolver_total") == 1


def test_resolvers_have_their_status_and_the_time_of_the_last_check_back(
    desk: MetricsBroker,
) -> None:
    now = desk.broker.now()
    up, down, fresh = (now, 0), (now - 60 * SECOND, now - 50 * SECOND), (0, 0)
    desk.oracle.is_like = tuple(
        ResolverStatus(name, seen_at, since, "refused" if since else "", 0, "")
        for name, (seen_at, since) in {"up": up, "down": down, "new": fresh}.items()
    )
    assert [desk.value("txmq_resolver_up", resolver=name) for name in ("up", "down", "new")] == [
        1,
        0,
        0,
    ]
    seen = [
        desk.value("txmq_resolver_seen_timestamp_seconds", resolver=name)
        for name in ("up", "down", "new")
    ]
    assert seen == [now / SECOND, now / SECOND - 60, 0]
    raised = {
        rule.name: desk.value("txmq_alarm", name=rule.name, severity=rule.severity)
        for rule in ALARM_RULES
    }
    assert raised == dict.fromkeys(raised, 0) | {"resolver.unreachable": 1}


@pytest.mark.parametrize(
    ("by", "kind"),
    [
        ("producer", "producer"),
        ("operator ada", "operator"),
        ("timeout", "timeout"),
        ("", "other"),
        ("x y", "other"),
    ],
)
def test_a_name_is_no_label(by: str, kind: str) -> None:
    assert decider_kind(by) == kind
