"""A shared log over a real Kafka of three nodes, which are killed and frozen."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

import pytest
from confluent_kafka import Consumer, ElectionType, KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic

from tests.broker.cluster.loop import Loop
from tests.broker.cluster.obedient_nodes import ObedientNode, begin_log, broken_promises
from tests.freezing import freeze
from tests.kafka_nodes import NODES, KafkaNode, KafkaNodes, kafka_nodes, needs_kafka
from tests.reporting import Report
from txmq.broker.cluster import kafka_partition, kafka_topic
from txmq.broker.cluster.kafka_partition import SAFE_WRITES, WHOLE_READS, KafkaPartition
from txmq.broker.cluster.kafka_topic import check, create, describe
from txmq.errors import ConfigError
from txmq.store.shared.node import End
from txmq.store.shared.records import MOST_DATA
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import PATIENCE_S, wait_until

pytestmark = needs_kafka
Outage = Callable[[KafkaNode], None]
NUMBERS = count()
ROOT = Path(__file__).parents[3]
WRITER = "tests.broker.cluster.writing_node"


class SharedLog:
    """A log in a topic of its own, and its nodes. The first of them leads."""

    def __init__(self, kafka: KafkaNodes, topic: str) -> None:
        self.kafka, self.topic, self.loop = kafka, topic, Loop()
        self.nodes: list[ObedientNode] = []
        begin_log(self.loop, self.partition())
        self.leader = self.node()
        self.claim(self.leader)

    def partition(self, report_within_s: float = PATIENCE_S) -> KafkaPartition:
        return KafkaPartition(
            self.loop, self.kafka.address, self.topic, report_within_s=report_within_s
        )

    def node(self) -> ObedientNode:
        """Return a node that has read everything."""
        node = ObedientNode(self.partition(), f"node {len(self.nodes)}")
        self.nodes.append(node)
        self.loop.run_until(lambda: node.has_read_all, "it has read everything")
        return node

    def claim(self, node: ObedientNode) -> None:
        assert node.claim()
        self.decide(node)
        assert node.leads_on

    def append(self, data: bytes) -> None:
        self.leader.append(data)
        self.decide(self.leader)

    def decide(self, node: ObedientNode) -> None:
        self.loop.run_until(lambda: node.is_decided, f"{node.name} knows what counts")

    def broken_promises(self) -> list[str]:
        return broken_promises(self.nodes, bytes(self.node().log))

    def first_offset(self) -> int:
        consumer = self.kafka.address.client(Consumer, WHOLE_READS)
        first, _next = consumer.get_watermark_offsets(TopicPartition(self.topic, 0))
        consumer.close()
        return int(first)

    def close(self) -> None:
        for node in self.nodes:
            node.partition.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaNodes]:
    with kafka_nodes(tmp_path_factory.mktemp("kafka")) as nodes:
        yield nodes


@pytest.fixture
def kafka(nodes: KafkaNodes) -> KafkaNodes:
    """Three nodes of Kafka, all of them up."""
    nodes.heal()
    return nodes


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a topic that was made as long as it takes."""
    monkeypatch.setattr(kafka_topic, "KNOWN_WITHIN_S", PATIENCE_S)


@pytest.fixture
def topic() -> str:
    """A name that no other test has."""
    return f"log-{next(NUMBERS)}"


@pytest.fixture
def log(kafka: KafkaNodes, topic: str) -> Iterator[SharedLog]:
    """A log in a topic that was made right."""
    create(kafka.address, topic)
    log = SharedLog(kafka, topic)
    yield log
    log.close()


def make(kafka: KafkaNodes, topic: str, settings: dict[str, str], nodes: list[int]) -> None:
    """Make a topic with these settings, whose copies are on these nodes."""
    new = NewTopic(topic, num_partitions=1, replica_assignment=[nodes], config=settings)
    [made] = kafka.admin.create_topics([new]).values()
    made.result()
    wait_until(lambda: kafka.in_sync(topic) == {*nodes}, what="the topic is there")


def test_a_topic_that_is_made_by_us_passes_the_check(kafka: KafkaNodes, topic: str) -> None:
    assert create(kafka.address, topic)
    assert check(kafka.address, topic) == describe(kafka.address, topic)
    assert not create(kafka.address, topic)  # once more


def test_a_topic_that_may_lose_records_does_not(kafka: KafkaNodes, topic: str) -> None:
    make(kafka, topic, {"min.insync.replicas": "1", "retention.ms": "1000"}, [1, 2])
    with pytest.raises(ConfigError) as refused:
        check(kafka.address, topic)
    assert str(refused.value).startswith(
        f"cluster.topic: {topic} may lose what it has acknowledged: replication.factor is 2, and"
        " must be at least 3; min.insync.replicas is 1, and must be at least 2; retention.ms is"
        " 1000, and must be -1 ("
    )
    accepted = ["replication.factor", "min.insync.replicas", "retention.ms"]
    assert check(kafka.address, topic, accepted).settings["partitions"] == "1"


def test_a_topic_of_one_copy_is_for_those_who_want_it(kafka: KafkaNodes, topic: str) -> None:
    create(kafka.address, topic, replicas=1)
    with pytest.raises(ConfigError, match=r"replication\.factor is 1.*min\.insync\.replicas is 1"):
        check(kafka.address, topic)
    check(kafka.address, topic, ["replication.factor", "min.insync.replicas"])
    log = SharedLog(kafka, topic)
    log.append(b"one copy")
    assert log.leader.promised == b"one copy"
    log.close()


def test_a_topic_that_is_not_there_says_how_to_make_it(
    kafka: KafkaNodes, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_topic, "KNOWN_WITHIN_S", 0.0)
    with pytest.raises(ConfigError, match="`txmq cluster create` makes the topic"):
        check(kafka.address, topic)


def test_a_reader_of_what_was_forgotten_is_told_what_is_left(log: SharedLog) -> None:
    for number in range(9):
        log.append(b"%d" % number)
    floor = log.leader.node.place.offset
    log.leader.partition.forget_before(floor)
    lost: list[int] = []
    partition = log.partition()
    wait_until(lambda: log.first_offset() == floor, what="records are removed")
    partition.read_from(0, lambda *_: None, lambda _: None, lost.append)
    log.loop.run_until(lambda: lost, "what was lost")
    partition.close()
    assert lost == [floor]
    log.append(b"the leader goes on")
    assert log.leader.promised.endswith(b"the leader goes on")


def test_the_largest_slice_is_taken(log: SharedLog) -> None:
    log.append(bytes(MOST_DATA))
    assert log.leader.leads_on
    assert log.broken_promises() == []


@pytest.mark.parametrize("outage", [KafkaNode.kill, KafkaNode.freeze])
def test_an_outage_of_kafkas_leader_loses_nothing(log: SharedLog, outage: Outage) -> None:
    log.append(b"before ")
    outage(log.kafka.nodes[log.kafka.leader(log.topic)])
    log.append(b"between ")
    log.kafka.heal()
    log.append(b"after")
    assert log.leader.promised == b"before between after"
    assert log.broken_promises() == []


@pytest.mark.parametrize("outage", [KafkaNode.kill, KafkaNode.freeze])
def test_a_claim_during_an_outage_deposes_the_leader(log: SharedLog, outage: Outage) -> None:
    """Its slice may come before the claim or after it: whichever, both nodes agree."""
    old, new = log.leader, log.node()
    old.partition.hold()
    outage(log.kafka.nodes[log.kafka.leader(log.topic)])
    old.append(b"of the old leader ")
    log.claim(new)
    log.kafka.heal()
    old.partition.release()
    log.decide(old)
    log.leader = new
    log.append(b"of the new one")
    log.loop.run_until(lambda: old.end, "the old leader has ended")
    assert old.end is End.DEPOSED
    assert log.broken_promises() == []


def test_a_process_that_stood_still_finds_out_that_it_leads_no_more(log: SharedLog) -> None:
    command = [sys.executable, "-m", WRITER, log.kafka.address.servers, log.topic]
    with subprocess.Popen(
        reaped(command), stdin=reaper_pipe(), stdout=subprocess.PIPE, text=True, cwd=ROOT,
        start_new_session=True,
    ) as writer:  # fmt: skip
        assert writer.stdout is not None
        for _ in range(20):
            promised = writer.stdout.readline()
        freeze(writer.pid)
        log.leader = log.node()
        log.claim(log.leader)
        log.append(b"of the next leader")
        writer.send_signal(signal.SIGCONT)
        *_, promised, end = [promised, *writer.stdout]
    assert end.rstrip() == End.DEPOSED
    assert bytes(log.leader.log).decode().startswith(promised.rstrip())
    assert log.broken_promises() == []


def lose_the_first_copy(log: SharedLog, *, is_believed: bool) -> None:
    """Append while only Kafka's leader takes records, which then dies for good."""
    first = log.kafka.leader(log.topic)
    others = {*NODES} - {first}
    for number in others:
        log.kafka.nodes[number].freeze()
    if is_believed:  # fetches that wait take up to 1 MiB more to the others' sockets
        log.leader.append(bytes(2 * MOST_DATA))
        log.decide(log.leader)
    log.leader.append(b"at one node")
    if is_believed:
        log.decide(log.leader)
    log.kafka.nodes[first].kill()
    for number in others:
        log.kafka.nodes[number].start()
    wait_until(lambda: log.kafka.leader(log.topic) in others, what="another node leads")
    log.kafka.heal()
    log.decide(log.leader)


def test_what_one_node_of_kafka_has_is_not_confirmed(log: SharedLog) -> None:
    log.append(b"kept ")
    lose_the_first_copy(log, is_believed=False)
    assert log.broken_promises() == []


def test_planted_the_acknowledgement_of_one_node_is_believed(
    log: SharedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = {**SAFE_WRITES, "acks": 1, "enable.idempotence": False}
    monkeypatch.setattr(kafka_partition, "SAFE_WRITES", weak)
    log.leader.partition.replace(log.partition())
    log.append(b"kept ")
    lose_the_first_copy(log, is_believed=True)
    assert log.broken_promises() == [log.leader.name]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
def test_rounds_of_outages_and_claims(log: SharedLog, report: Report, seed: int) -> None:
    """In each, a node of Kafka fails while a node of the log stands still or leads."""
    rng, done = Random(seed), Counter[str]()
    for number in range(12):
        outage = rng.choice([KafkaNode.kill, KafkaNode.freeze])
        node, old = log.kafka.nodes[rng.choice(NODES)], log.leader
        if stands_still := rng.random() < 0.5:
            old.partition.hold()
            log.leader = log.node()
        outage(node)
        old.append(b"%d while a node fails " % number)
        if stands_still:
            log.claim(log.leader)
            log.append(b"%d of the next leader " % number)
            old.partition.release()
        log.decide(old)
        node.start()
        log.append(b"%d after " % number)
        done[f"{outage.__name__} {'and a claim' if stands_still else 'alone'}"] += 1
        wait_until(lambda: log.kafka.in_sync(log.topic) == {*NODES}, what="all are in sync")
    report(done + sum((node.reports for node in log.nodes), Counter()))
    assert log.broken_promises() == []


def test_without_enough_nodes_in_sync_the_leader_ends(kafka: KafkaNodes, topic: str) -> None:
    make(kafka, topic, {"min.insync.replicas": "3"}, [*NODES])
    log = SharedLog(kafka, topic)
    log.append(b"before ")
    kafka.nodes[3].kill()
    wait_until(lambda: kafka.in_sync(topic) == {1, 2}, what="a node is missing")
    log.leader.partition.replace(log.partition(report_within_s=1.0))
    log.append(b"not for sure ")
    assert (log.leader.end, log.leader.promised) == (End.UNDELIVERED, b"before ")
    kafka.heal()
    wait_until(lambda: kafka.in_sync(topic) == {*NODES}, what="all nodes are in sync")
    log.leader = log.node()
    log.claim(log.leader)
    log.append(b"after")
    assert log.broken_promises() == []


def test_a_topic_that_is_made_again_is_not_the_one_that_was_read(log: SharedLog) -> None:
    log.append(b"before")
    kafka, follower = log.kafka, log.node()
    was = describe(kafka.address, log.topic)
    [removed] = kafka.admin.delete_topics([log.topic]).values()
    removed.result()

    def is_made() -> bool:
        with suppress(ConfigError):  # it is being removed
            create(kafka.address, log.topic)
        with suppress(ConfigError):  # not all nodes know yet
            return describe(kafka.address, log.topic).id != was.id
        return False

    wait_until(is_made, what="the topic is made again")
    log.append(b"into another log")
    log.loop.run_until(lambda: follower.end and log.leader.end, "both have ended")
    assert follower.end is End.DIVERGED
    assert log.leader.promised == b"before"


def test_an_unclean_election_is_noticed_by_readers(kafka: KafkaNodes, topic: str) -> None:
    make(kafka, topic, {"min.insync.replicas": "1"}, [1, 2])
    log = SharedLog(kafka, topic)
    log.append(b"kept ")
    wait_until(lambda: kafka.in_sync(topic) == {1, 2}, what="two nodes have it")
    kafka.nodes[2].kill()
    wait_until(lambda: kafka.in_sync(topic) == {1}, what="one node has it")
    log.append(b"lost")
    follower = log.node()
    kafka.nodes[1].kill()
    kafka.nodes[2].start()

    def elected() -> bool:
        place = TopicPartition(topic, 0)
        # It is refused while the nodes' controllers elect one of them.
        with suppress(KafkaException):
            kafka.admin.elect_leaders(ElectionType.UNCLEAN, [place]).result()
        return kafka.leader(topic) == 2

    wait_until(elected, what="the node without it leads")
    log.loop.run_until(lambda: follower.end and log.leader.end, "both have ended")
    assert (follower.end, log.leader.end) == (End.DIVERGED, End.DIVERGED)
    assert log.broken_promises() == [log.leader.name]  # hence the check of the topic
    # A node that starts later finds another record where it was.
    late = ObedientNode(log.partition(), "late", log.leader.node.place)
    begin_log(log.loop, late.partition)
    begin_log(log.loop, late.partition)
    log.loop.run_until(lambda: late.end, "it has ended")
    assert late.end is End.DIVERGED
    late.partition.close()
    with pytest.raises(ConfigError, match=r"replication\.factor is 2"):
        check(kafka.address, topic)
