"""Let many messages wait for their next delivery, at different times; then measure
those that are due.

    python -m tests.bench.clients.retries URL PID MESSAGES

Prints {"rss_anon", "watched", "p50_us", "p99_us"}. `rss_anon` is that of the broker PID
when all wait. The last `WATCHED` are due soon, `PER_S` a second. p50 and p99 are their
delays at the consumer.
"""

from __future__ import annotations

import json
import sys
import time
from uuid import uuid4

import txmq
from tests.bench.clients.consume_keys import WITHIN_S, fill
from tests.bench.harness import rss_anon
from tests.bench.raw.latency import latency_us
from txmq.client.blocking.consumer.consumer import Consumer

KEYS, FAR_S, EACH_S = 100_000, 3_600.0, 0.01
WATCHED, PER_S, NACKS_PER_S = 5_000, 500, 250.0
FAR_UNDER_WAY, NEAR_UNDER_WAY = (
    2_000,
    20,
)  # a delay begins when the broker receives the nack
Due = dict[tuple[int, int], float]


def nack_all(consumer: Consumer, messages: int, first: float, each_s: float, under_way: int) -> Due:
    """Nack so many messages; return the due times by partition and offset.

    About `under_way` nacks wait for their answers at a time.
    """
    due: Due = {}
    for number in range(messages):
        message = consumer.receive(WITHIN_S)
        assert message is not None, "they are all there"
        wanted = first + number * each_s
        consumer.nack(message, max(0.0, wanted - time.time()))
        due[message.partition, message.offset] = wanted
        if number % (under_way // 2) == 0:
            confirmed(consumer, consumer.stats.delivered - under_way // 2)
    confirmed(consumer, consumer.stats.delivered)
    return due


def confirmed(consumer: Consumer, nacks: int) -> None:
    """Wait until the broker has so many nacks."""
    while consumer.stats.nacked < nacks:
        time.sleep(0.002)


def watch(consumer: Consumer, due: Due) -> list[float]:
    """Return the delay of each message."""
    late = []
    for _ in due:
        message = consumer.receive(WITHIN_S)
        assert message is not None, "it is due"
        late.append(max(0.0, time.time() - due[message.partition, message.offset]))
        consumer.ack(message)
    return late


def measure(url: str, pid: int, messages: int) -> dict[str, float]:
    topic, near = f"bench-{uuid4().hex[:8]}", min(WATCHED, messages // 2)
    with txmq.connect(url, timeout=WITHIN_S) as client:
        fill(client, topic, KEYS, messages)
        retry = txmq.RetryPolicy((1,), retries=100)
        with client.consumer(topic, [topic], retry=retry, flood_keys=0) as consumer:
            nack_all(consumer, messages - near, time.time() + FAR_S, EACH_S, FAR_UNDER_WAY)
            due = nack_all(
                consumer, near, time.time() + near / NACKS_PER_S, 1 / PER_S, NEAR_UNDER_WAY
            )
            largest = rss_anon(pid)
            late = watch(consumer, due)
    return {"rss_anon": largest, "watched": len(late), **latency_us(late)}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
