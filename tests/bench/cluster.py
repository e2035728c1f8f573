"""A cluster of three nodes over a Kafka of three nodes, all on this machine.

They need Java and Kafka's jars.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from uuid import uuid4

import txmq
from tests.bench.brokers import broker, cpu_s
from tests.bench.harness import BenchError, in_turn, measured, python
from tests.bench.raw.latency import percentile
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from tests.broker.cluster.broker_nodes import (
    PARTITIONS,
    BrokerNode,
    broker_nodes,
    leader_of,
    url_of,
)
from tests.kafka_nodes import JARS, JAVA, NODES, SESSION_S, KafkaNode, KafkaNodes, kafka_nodes
from txmq.broker.cluster.kafka_genesis import begin_log
from txmq.broker.cluster.kafka_topic import create
from txmq.errors import TxmqError
from txmq.store.shared.records import Genesis
from txmq.testing.wait import PATIENCE_S, wait_until

CLIENTS = "tests.bench.clients"
SIZES = {"300b": 300, "32k": 32 << 10}
ROUNDS = 5
OURS, BARE = f"{CLIENTS}.kafka_flush", "tests.bench.raw.kafka_produce"
SHARED = "shared"  # the topic of `broker_nodes`
BODY = bytes(1_024)
Times = Sequence[tuple[float, int]]


@contextmanager
def real_kafka(run: Run) -> Iterator[KafkaNodes]:
    """Run three nodes of Kafka during the block."""
    if JAVA is None or not JARS.exists():
        raise BenchError("no Java, or no jars of Kafka: run `python -m tests.kafka_nodes`")
    with TemporaryDirectory(dir=run.directory) as directory, kafka_nodes(Path(directory)) as kafka:
        yield kafka


@contextmanager
def nodes_over(run: Run, kafka: KafkaNodes, program: str = "txmq") -> Iterator[list[BrokerNode]]:
    """Run three nodes of a new log during the block."""
    with (
        TemporaryDirectory(dir=run.directory) as directory,
        broker_nodes(Path(directory), kafka.address.servers, program=program) as nodes,
    ):
        wait_for_all(nodes)
        yield nodes


def wait_for_all(nodes: list[BrokerNode]) -> None:
    """Wait until each node has read everything and one of them leads."""
    for node in nodes:
        wait_until(node.view, what=f"{node.name} has read everything")
    leader_of(nodes)


@benchmark("cluster.flush", "a flush of a node that leads, beside a bare record, acks=all")
def flush(run: Run) -> Iterator[Row]:
    with real_kafka(run) as kafka:
        for topic in ("log", "bare"):
            create(kafka.address, topic)
        begin_log(kafka.address, "log", Genesis(uuid4(), 0, 0, 0))
        for name, size in SIZES.items():
            sides = ((OURS, "log"), (BARE, "bare"))
            args = (run.count(1_000), size)
            rounds = [
                [measured(python(one, kafka.address.servers, topic, *args)) for one, topic in sides]
                for _ in range(ROUNDS)
            ]
            ours, bare = (
                {figure: median(one[figure] for one in side) for figure in side[0]}
                for side in zip(*rounds, strict=True)
            )
            what = f"a flush of {size} bytes by a leader, acks=all"
            for figure, goal in (("p50", at_most(1.2)), ("p99", None)):
                beside = f"{what}, beside a bare record: {figure}"
                yield row(
                    f"cluster.flush.{name}_{figure}", beside, "µs",
                    ours[f"{figure}_us"], yardstick=bare[f"{figure}_us"], goal=goal,
                )  # fmt: skip
            cpu = f"{what}: CPU of its process"
            yield row(f"cluster.flush.{name}_cpu", cpu, "µs", ours["cpu_us"], goal=at_most(400))
            bare_cpu = f"a bare record of {size} bytes, acks=all: CPU of its process"
            yield row(f"cluster.flush.{name}_bare_cpu", bare_cpu, "µs", bare["cpu_us"])


@benchmark("cluster.send", "sends of 1 KiB outstanding, in a cluster")
def send(run: Run) -> Iterator[Row]:
    count = run.count(100_000)

    def per_s(url: str, outstanding: int) -> float:
        return float(measured(python(f"{CLIENTS}.send_async", url, count, outstanding))["per_s"])

    def local(outstanding: int) -> float:
        with broker(run, f"partitions = {PARTITIONS}") as program:
            return per_s(program.address, outstanding)

    with real_kafka(run) as kafka, nodes_over(run, kafka) as nodes:
        for outstanding, goal in ((64, at_least(0.3)), (1_024, at_least(0.7))):
            ours, alone = in_turn(
                3, partial(per_s, url_of(nodes), outstanding), partial(local, outstanding)
            )
            what = f"1 KiB, {outstanding:,} outstanding, beside a broker alone with fsync"
            name = f"cluster.send_{outstanding}"
            yield row(name, what, "msg/s", ours, yardstick=alone, goal=goal)


@benchmark("cluster.follow", "followers behind a leader under full load")
def follow(run: Run) -> Iterator[Row]:
    count = run.count(100_000)
    with (
        real_kafka(run) as kafka,
        nodes_over(run, kafka, f"{CLIENTS}.timed_node") as nodes,
    ):
        leader = leader_of(nodes)
        followers = [node for node in nodes if node is not leader]
        all_nodes = (leader, *followers)
        began, before = time.monotonic(), [cpu_s(node.process.pid) for node in all_nodes]
        sent = measured(python(f"{CLIENTS}.send_async", url_of(nodes), count, 1_024))
        wait_until(lambda: len({*map(position_of, nodes)}) == 1, what="all nodes have it all")
        over, after = time.monotonic(), [cpu_s(node.process.pid) for node in all_nodes]
        if leader_of(nodes) is not leader:
            raise BenchError("another node leads now")
        for node in (*followers, leader):
            node.end()
        led, *followed = (times_of(node) for node in all_nodes)
    late = [one for times in followed for one in delays(led, times, began, over)]
    cpu, *others = ((now - then) / count * 1e6 for now, then in zip(after, before, strict=True))
    what = f"1,024 sends of 1 KiB outstanding, {sent['per_s']:,.0f}/s"
    delay = f"{what}: a follower has taken over what was answered, after"
    yield row("cluster.follow_p50", f"{delay}: p50", "ms", percentile(late, 50) * 1e3)
    p99 = percentile(late, 99) * 1e3
    yield row("cluster.follow_p99", f"{delay}: p99", "ms", p99, goal=at_most(200))
    yield row(
        "cluster.follow_cpu", f"{what}: CPU of a follower for a message, beside the leader's", "µs",
        max(others), yardstick=cpu, goal=at_most(0.8),
    )  # fmt: skip


def position_of(node: BrokerNode) -> int | None:
    """Return where a node's copy of the log ends; None while it does not answer."""
    view = node.view()
    return view and next(one.position for one in view.nodes if one.name == node.name)


def times_of(node: BrokerNode) -> Times:
    """Return what a timed node has noted."""
    noted: Times = json.loads(node.config.with_suffix(".times").read_text())
    return noted


def delays(led: Times, followed: Times, began: float, over: float) -> list[float]:
    """Return how late a follower had each flush that was answered meanwhile."""
    ends = [end for _at, end in followed]
    flushes = [(at, followed[bisect_left(ends, end)][0]) for at, end in led if began <= at < over]
    return [max(0.0, had_at - at) for at, had_at in flushes]


@benchmark("cluster.failover", "a leader is killed, until a send is acknowledged")
def failover(run: Run) -> Iterator[Row]:
    with real_kafka(run) as kafka, nodes_over(run, kafka) as nodes:
        took = [pause_s(nodes) for _ in range(run.count(20))]
    yield from pauses("cluster.failover", "a leader is killed", took, 3.0)


@benchmark("cluster.failover_both", "the same together with the leader of Kafka's partition")
def failover_both(run: Run) -> Iterator[Row]:
    took = []
    with real_kafka(run) as kafka, nodes_over(run, kafka) as nodes:
        for _ in range(run.count(10)):
            took.append(pause_s(nodes, kafka[kafka.leader(SHARED)]))
            kafka.heal()
            wait_until(lambda: kafka.in_sync(SHARED) == {*NODES}, what="Kafka is whole")
    what = f"together with Kafka's leader, whose session is {SESSION_S} s"
    yield from pauses("cluster.failover_both", what, took, SESSION_S + 3)


def pause_s(nodes: list[BrokerNode], *others: KafkaNode) -> float:
    """Kill the leader and others, and start it again. Return how long no send was
    acknowledged.
    """
    leader = leader_of(nodes)
    with txmq.connect(url_of(nodes), service="bench", timeout=PATIENCE_S) as client:
        client.send("bench", BODY)
        began = time.perf_counter()
        for other in others:
            other.kill()
        leader.kill()
        send_until_acknowledged(client)
        took_s = time.perf_counter() - began
    leader.start()
    wait_for_all(nodes)
    return took_s


def send_until_acknowledged(client: txmq.Client) -> None:
    """Send until a message is stored for certain."""
    acknowledged = False
    while not acknowledged:
        with suppress(TxmqError):
            client.send("bench", BODY)
            acknowledged = True


def pauses(name: str, what: str, took: Sequence[float], goal: float) -> Iterator[Row]:
    """Yield the rows of the times until a send was acknowledged."""
    until = f"{what}, until a send of 1 KiB is acknowledged, {len(took)} times"
    yield row(f"{name}_p50", f"{until}: p50", "s", percentile(took, 50))
    yield row(f"{name}_p99", f"{until}: p99", "s", percentile(took, 99), goal=at_most(goal))
