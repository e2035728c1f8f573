"""Append to a shared log, one flush at a time, as a broker that leads does.

    python -m tests.bench.clients.kafka_flush SERVERS TOPIC COUNT BYTES

A node leads the log, which has no other node. Prints {"p50_us", "p99_us", "cpu_us"} as
`tests.bench.raw.kafka_produce` does: of a flush, until it may be answered.
"""

from __future__ import annotations

import json
import os
import sys
import time
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall, react

from tests.bench.raw.latency import latency_us
from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.broker.cluster.kafka_partition import KafkaPartition
from txmq.broker.cluster.own_node import TICKS
from txmq.store.shared.node import DEFAULT_TIMING, End, Node
from txmq.store.shared.records import NodeStatus, PartitionRecord
from txmq.store.shared.rules import Place

WARM_UP = 50


class Writer:
    """The listener of a node. It keeps no copy of the log."""

    def __init__(self) -> None:
        self.leading, self.answered = Deferred[None](), Deferred[None]()

    def counted(self, record: PartitionRecord, place: Place) -> None: ...

    def heard(self, said: NodeStatus, place: Place, *, is_history: bool) -> None: ...

    def leads(self, _place: Place) -> None:
        self.leading.callback(None)

    def confirmed(self, _position: int) -> None:
        self.answered.callback(None)

    def ended(self, end: End, detail: str) -> None:
        self.answered.errback(ConnectionError(f"{end}: {detail}"))


async def append(node: Node, writer: Writer, count: int, size: int) -> list[float]:
    """Return the seconds from each call to its answer."""
    took, body = [], os.urandom(size)
    for _ in range(count):
        writer.answered = Deferred()
        began = time.perf_counter()
        node.append(body, time.monotonic())
        await writer.answered
        took.append(time.perf_counter() - began)
    return took


async def measure(reactor: Any, servers: str, topic: str, count: int, size: int) -> None:
    """Wait until the node leads; measure and print."""
    partition, writer = KafkaPartition(reactor, KafkaAddress(servers), topic), Writer()
    node = Node(
        partition, writer, Place(), name="bench", nonce=os.urandom(16), rng=Random(0),
        now=time.monotonic(),
    )  # fmt: skip
    node.start()
    ticking = LoopingCall(lambda: node.tick(time.monotonic()))
    ticking.start(DEFAULT_TIMING.beat_s / TICKS)
    await writer.leading
    await append(node, writer, WARM_UP, size)
    began = time.process_time()
    took = await append(node, writer, count, size)
    cpu_us = (time.process_time() - began) / count * 1e6
    print(json.dumps({**latency_us(took), "cpu_us": cpu_us}))
    ticking.stop()
    partition.close()


def main(reactor: Any, servers: str, topic: str, count: int, size: int) -> Deferred[None]:
    """Run the measurement in the reactor."""
    return Deferred.fromCoroutine(measure(reactor, servers, topic, count, size))


if __name__ == "__main__":
    react(main, (sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
