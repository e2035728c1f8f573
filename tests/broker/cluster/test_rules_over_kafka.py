"""Rules R and B with real producers and consumers, over librdkafka's mock of Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random

import pytest

from tests.broker.cluster.loop import Loop
from tests.broker.cluster.mock_cluster import CUT, NODES, REFUSALS, TOPIC, MockCluster
from tests.broker.cluster.obedient_nodes import ObedientNode, begin_log, broken_promises
from tests.reporting import Report
from txmq.broker.cluster.kafka_partition import KafkaPartition
from txmq.store.shared.rules import Expectation
from txmq.testing.wait import PATIENCE_S

TIMES = 3


class Nodes:
    """Nodes over a mock cluster; one leads, until another one ends that."""

    def __init__(self, seed: int) -> None:
        self.cluster, self.loop, self.rng = MockCluster(), Loop(), Random(seed)
        self.nodes: list[ObedientNode] = []
        self.faults: Counter[str] = Counter()
        self._written = 0
        begin_log(self.loop, self.partition())
        self.leader = self.new_leader()

    def partition(self) -> KafkaPartition:
        return KafkaPartition(self.loop, self.cluster.address, TOPIC, report_within_s=PATIENCE_S)

    def new_node(self) -> ObedientNode:
        """Return a node that has read everything."""
        node = ObedientNode(self.partition(), f"node {len(self.nodes)}")
        self.nodes.append(node)
        self.loop.run_until(lambda: node.has_read_all, "it has read everything")
        return node

    def new_leader(self) -> ObedientNode:
        """Return a new node, which leads."""
        node = self.new_node()
        assert node.claim()
        self.decide(node)
        assert node.leads_on
        return node

    def append(self, node: ObedientNode) -> None:
        self._written += 1
        node.append(b"%d of %s;" % (self._written, node.name.encode()))

    def decide(self, node: ObedientNode) -> None:
        self.loop.run_until(lambda: node.is_decided, f"{node.name} knows what counts")

    def refused(self) -> None:
        """Refuse a record so many times."""
        errors = [self.rng.choice(REFUSALS) for _ in range(self.rng.randint(1, 3))]
        self._fail("refused", errors)

    def cut_before(self) -> None:
        """Cut the connection before the record is taken."""
        self._fail("cut before", [CUT])

    def _fail(self, fault: str, errors: list[int]) -> None:
        self.cluster.refuse(errors)
        self.cluster.produced()
        self.append(self.leader)
        self.decide(self.leader)
        assert self.cluster.produced() > len(errors)
        self.faults[fault] += len(errors)

    def cut_after(self) -> None:
        """Cut the connection after the record was taken: the producer sends a copy."""
        follower = self.new_node()
        self.cluster.answer_late()
        self.append(self.leader)
        log = bytes(self.leader.log)
        self.loop.run_until(lambda: follower.log == log, "the record can be read")
        assert not self.leader.is_decided
        self.cluster.cut()
        self.cluster.mend()
        self.decide(self.leader)
        self.faults["cut after"] += 1

    def moved(self) -> None:
        """Move the leader of the partition."""
        node = self.rng.choice([node for node in NODES if node != self.cluster.leader])
        self.cluster.move_leader(node)
        assert self.cluster.leader == node
        self.append(self.leader)
        self.decide(self.leader)
        self.faults["moved"] += 1

    def overtaken(self) -> None:
        """Let another node claim while the leader stands still. It wakes and writes."""
        zombie = self.leader
        zombie.partition.hold()
        self.leader = self.new_leader()
        self.append(zombie)
        self.append(self.leader)
        reports = zombie.reports.total()
        self.loop.run_until(lambda: zombie.reports.total() > reports, "a report to the zombie")
        zombie.partition.release()
        self.decide(zombie)
        self.decide(self.leader)
        self.loop.run_until(lambda: not zombie.leads_on, "the zombie has read the claim")
        self.faults["overtaken"] += 1

    def raced(self) -> None:
        """Let two nodes claim at once."""
        old, both = self.leader, (self.new_node(), self.new_node())
        assert all(node.claim() for node in both)
        for node in both:
            self.decide(node)
        self.loop.run_until(lambda: old.end, "the leader before has ended")
        [self.leader] = [node for node in both if node.leads_on]
        self.append(self.leader)
        self.decide(self.leader)
        self.faults["raced"] += 1

    def run(self) -> None:
        """Do each fault some times, in an order of the seed."""
        faults = [
            self.refused, self.cut_before, self.cut_after, self.moved, self.overtaken, self.raced,
        ] * TIMES  # fmt: skip
        self.rng.shuffle(faults)
        for fault in faults:
            fault()
            self.close(node for node in self.nodes if node is not self.leader)

    def close(self, nodes: Iterable[ObedientNode]) -> None:
        for node in nodes:
            node.partition.close()

    def counts(self) -> Counter[str]:
        """Return the faults, and what the nodes were told of their slices."""
        return sum((node.reports for node in self.nodes), self.faults.copy())


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(seed=1)
    yield nodes
    nodes.close(nodes.nodes)


def test_nothing_that_a_node_answers_for_is_missing_in_the_log(
    nodes: Nodes, report: Report
) -> None:
    nodes.run()
    last = nodes.new_node()
    assert broken_promises(nodes.nodes, bytes(last.log)) == []
    counts = nodes.counts()
    report(counts)
    assert {"refused", "cut before", "cut after", "moved", "overtaken", "raced"} < counts.keys()
    assert min(counts["certain"], counts["asked"]) > 0
    assert counts["failed"] == 0


def test_planted_any_acknowledgement_is_taken_for_certain(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Expectation, "is_certain", lambda _self, offset: offset is not None)
    nodes.overtaken()
    zombie, last = nodes.nodes[0], nodes.new_node()
    assert broken_promises(nodes.nodes, bytes(last.log)) == [zombie.name]
