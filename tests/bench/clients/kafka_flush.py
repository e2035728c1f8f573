"""Produce to the partition of a shared log, one record at a time, in a reactor.

    python -m tests.bench.clients.kafka_flush SERVERS TOPIC COUNT BYTES

Prints {"p50_us", "p99_us", "cpu_us"} as `tests.bench.raw.kafka_produce` does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react

from tests.bench.raw.latency import latency_us
from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.broker.cluster.kafka_partition import KafkaPartition

WARM_UP = 50


async def produce(partition: KafkaPartition, count: int, size: int) -> list[float]:
    """Return the seconds from each call to its report."""
    took, body = [], os.urandom(size)
    for _ in range(count):
        done: Deferred[None] = Deferred()

        def report(error: Exception | None, _offset: int | None, done: Any = done) -> None:
            done.errback(error) if error else done.callback(None)

        began = time.perf_counter()
        partition.produce(body, report)
        await done
        took.append(time.perf_counter() - began)
    return took


async def measure(reactor: Any, servers: str, topic: str, count: int, size: int) -> None:
    """Measure and print."""
    partition = KafkaPartition(reactor, KafkaAddress(servers), topic)
    await produce(partition, WARM_UP, size)
    began = time.process_time()
    took = await produce(partition, count, size)
    cpu_us = (time.process_time() - began) / count * 1e6
    print(json.dumps({**latency_us(took), "cpu_us": cpu_us}))
    partition.close()


def main(reactor: Any, servers: str, topic: str, count: int, size: int) -> Deferred[None]:
    """Run the measurement in the reactor."""
    return Deferred.fromCoroutine(measure(reactor, servers, topic, count, size))


if __name__ == "__main__":
    react(main, (sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
