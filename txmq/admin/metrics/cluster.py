"""Metrics of a node of a cluster. Of the other nodes the leader tells, so that each is
told of once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.monitoring.cluster_node import ClusterNode, NodeNumbers


class ClusterMetrics(Collector):
    """What this node does, and how far behind its followers are."""

    def __init__(self, cluster: ClusterNode) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        numbers = self._cluster.numbers()
        yield GaugeMetricFamily(
            "txmq_cluster_leader", "1 while this node leads, 0 while it follows", int(numbers.leads)
        )
        yield GaugeMetricFamily(
            "txmq_cluster_epoch", "Number of the claim that counts", numbers.epoch
        )
        yield GaugeMetricFamily(
            "txmq_cluster_heard_seconds", "Time since the log had something new", numbers.heard_s
        )
        yield CounterMetricFamily(
            "txmq_cluster_claims", "Claims of nodes that were read", numbers.claims
        )
        if numbers.leads:
            yield from self._leader(numbers)

    def _leader(self, numbers: NodeNumbers) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "txmq_cluster_unconfirmed_seconds",
            "Time since the leader wrote what was confirmed last",
            numbers.unconfirmed_s,
        )
        yield CounterMetricFamily(
            "txmq_cluster_questions",
            "Acknowledgements of Kafka that the leader had to read after",
            numbers.questions,
        )
        followers = self._cluster.view().followers
        yield GaugeMetricFamily(
            "txmq_cluster_followers", "Nodes that follow, and may lead next", len(followers)
        )
        lag = GaugeMetricFamily(
            "txmq_cluster_lag_bytes", "Bytes of the log that a follower lacks", labels=("node",)
        )
        behind = GaugeMetricFamily(
            "txmq_cluster_lag_seconds", "Time that a follower reads behind", labels=("node",)
        )
        for node in followers:
            lag.add_metric((node.name,), node.lag_bytes)
            behind.add_metric((node.name,), node.lag_s)
        yield from (lag, behind)
