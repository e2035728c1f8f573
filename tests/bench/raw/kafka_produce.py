"""Yardstick: produce to Kafka, one record at a time, by confluent-kafka alone.

    python -m tests.bench.raw.kafka_produce SERVERS TOPIC COUNT BYTES

Waits until all nodes in sync have each record. Prints {"p50_us", "p99_us", "cpu_us"};
`cpu_us` is the client's, for a record.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial

from confluent_kafka import Producer

from tests.bench.raw.latency import latency_us

WARM_UP = 50


def produce(producer: Producer, topic: str, count: int, size: int) -> list[float]:
    """Return the seconds from each call to its delivery report."""
    took, body = [], os.urandom(size)
    for _ in range(count):
        reports: list[object] = []
        began = time.perf_counter()
        producer.produce(topic, body, partition=0, on_delivery=partial(note, reports))
        while not reports:
            producer.poll(1.0)
        took.append(time.perf_counter() - began)
        if reports != [None]:
            raise ConnectionError(reports)
    return took


def note(reports: list[object], error: object, _message: object) -> None:
    reports.append(error)


def main(servers: str, topic: str, count: int, size: int) -> None:
    producer = Producer(
        {"bootstrap.servers": servers, "acks": "all", "enable.idempotence": True, "linger.ms": 0}
    )
    produce(producer, topic, WARM_UP, size)
    began = time.process_time()
    took = produce(producer, topic, count, size)
    cpu_us = (time.process_time() - began) / count * 1e6
    print(json.dumps({**latency_us(took), "cpu_us": cpu_us}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
