"""Rates, sizes and flush latencies for operators and Prometheus."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.broker.support import BrokerInMemory, parts_of, send_payload
from txmq.admin.metrics.exposition import Metrics
from txmq.broker.monitoring.statistics import PERIOD_S
from txmq.config.broker import load_broker
from txmq.core.consumers.commands import AckMessages, NackMessage
from txmq.core.topics.topics import CreateTopic
from txmq.store.log.latency import BOUNDS_US, Latencies
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch


class StatisticsBroker:
    """A broker whose statistics are observed while time passes."""

    def __init__(self) -> None:
        self.broker = BrokerInMemory()
        self.broker.start()
        self.broker.do(CreateTopic("t", 1))
        self.broker.do(CreateTopic("quiet", 2))
        self.client = self.broker.connect()
        self.sequence = 0
        self.broker.pass_time(2 * PERIOD_S)

    def send(self, count: int) -> None:
        for _ in range(count):
            assert self.client.ask(Opcode.SEND, send_payload(self.sequence)).status == 0
            self.sequence += 1

    def stats(self) -> Any:
        return self.broker.ask("broker.stats", limit=10)


@pytest.fixture
def desk() -> StatisticsBroker:
    return StatisticsBroker()


def test_rates_and_sizes_of_topics_the_busiest_first(desk: StatisticsBroker) -> None:
    desk.send(50)
    desk.broker.pass_time(PERIOD_S)
    busy, quiet = desk.stats()["topics"]
    assert (busy["topic"], busy["messages"], busy["partitions"]) == ("t", 50, 1)
    assert busy["bytes"] == 50 * 96
    assert 0 < busy["messages_per_s"] <= 50
    assert busy["bytes_per_s"] == pytest.approx(96 * busy["messages_per_s"], rel=0.1)
    assert (quiet["topic"], quiet["messages_per_s"], quiet["bytes"]) == ("quiet", 0.0, 0)
    desk.broker.pass_time(3 * PERIOD_S)
    assert {topic["messages_per_s"] for topic in desk.stats()["topics"]} == {0.0}


def test_a_group_has_the_rate_of_its_processed_messages(desk: StatisticsBroker) -> None:
    joined: Any = desk.client.call(
        "consumer.join", group="g", member="a", instance="a", mode="concurrent", topics=["t"]
    )
    desk.send(20)
    desk.broker.pass_time(2 * PERIOD_S)
    [group] = desk.stats()["groups"]
    assert (group["group"], group["unsettled"], group["messages_per_s"]) == ("g", 20, 0.0)
    desk.client.ask(
        Opcode.FETCH, pack_fetch(Fetch(joined["generation"], 0, 1 << 20, 100, "g", "a"))
    )
    desk.broker.do(AckMessages("g", "a", joined["generation"], (("t", 0, 0, 20),)))
    desk.broker.pass_time(PERIOD_S)
    [group] = desk.stats()["groups"]
    assert group["unsettled"] == 0
    assert group["messages_per_s"] > 0


def test_what_failed_or_was_filtered_is_not_processed(desk: StatisticsBroker) -> None:
    joined: Any = desk.client.call(
        "consumer.join", group="g", member="a", instance="a", mode="concurrent", topics=["t"]
    )
    desk.send(20)
    desk.broker.pass_time(2 * PERIOD_S)
    generation = joined["generation"]
    desk.client.ask(Opcode.FETCH, pack_fetch(Fetch(generation, 0, 1 << 20, 100, "g", "a")))
    for offset in range(10):
        desk.broker.do(NackMessage("g", "a", generation, "t", 0, offset, None, dead=True))
    desk.broker.do(AckMessages("g", "a", generation, (), (("t", 0, 10, 20),)))
    desk.broker.pass_time(PERIOD_S)
    [group] = desk.stats()["groups"]
    assert (group["unprocessed"], group["letters"], group["messages_per_s"]) == (10, 10, 0.0)


def test_flushes_are_counted_by_how_long_they_took(desk: StatisticsBroker) -> None:
    before = desk.stats()["flush"]["count"]
    desk.send(7)
    flush = desk.stats()["flush"]
    assert flush["count"] == before + 7
    assert 0 < flush["p50_us"] <= flush["p99_us"] <= flush["max_us"] <= flush["total_us"]
    assert [bound for bound, _count in flush["buckets"]] == list(BOUNDS_US)
    counts = [count for _bound, count in flush["buckets"]]
    assert counts == sorted(counts)


def test_prometheus_gets_the_histogram_and_the_sizes(desk: StatisticsBroker) -> None:
    desk.send(3)
    parts = parts_of(desk.broker, load_broker(None, {"data": "/data"}))
    found = {
        (sample.name, sample.labels.get("topic") or sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(Metrics(parts).text().decode())
        for sample in family.samples
    }
    assert found["txmq_flush_seconds_bucket", "+Inf"] == found["txmq_flush_seconds_count", ""] > 0
    assert found["txmq_topic_bytes", "t"] == found["txmq_topic_stored_bytes_total", "t"] == 3 * 96


def test_quantiles_are_the_bounds_of_their_buckets() -> None:
    latencies = Latencies()
    assert latencies.quantile(0.5) == 0
    for micros in (90, 95, 180, 2_500, 3_000_000):
        latencies.observe(micros / 1e6)
    assert [latencies.quantile(share) for share in (0.2, 0.5, 0.8, 0.99)] == [
        100,
        200,
        3_000,
        3_000_000,
    ]
    assert (latencies.count, latencies.max_us, latencies.counts[-1]) == (5, 3_000_000, 1)
