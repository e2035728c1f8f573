"""Many messages wait for their next delivery, each for its own time; then some of them
are due.

python -m tests.bench.clients.retrying URL PID MESSAGES       prints {"rss_anon", "watched", "p50_us", "p99_us"}

`rss_anon` is of the broker PID when all wait. The last `WATCHED` are due soon, `PER_S`
a second; p50 and p99 are how much later they were in the consumer's hands, by the
machine's clock.
"""

from __future__ import annotations

import json
import sys
import time
from uuid import uuid4

import txmq
from tests.bench.clients.taking import WITHIN_S, fill
from tests.bench.harness import latency_us, rss_anon
from txmq.client.blocking.consumer.consumer import Consumer

KEYS, FAR_S, EACH_S = 100_000, 3_600.0, 0.01
WATCHED, PER_S, NACKS_PER_S = 5_000, 500, 250.0
FAR_UNDER_WAY, NEAR_UNDER_WAY = (
    2_000,
    20,
)  # the delay of one counts from when the broker gets its nack
Due = dict[tuple[int, int], float]


def put_off(consumer: Consumer, messages: int, first: float, each_s: float, under_way: int) -> Due:
    """Nacks so many, the first until that time; returns when each is due, by partition
    and offset.

    About so many nacks wait for the broker's answer at a time.
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
    """Returns once the broker has so many."""
    while consumer.stats.nacked < nacks:
        time.sleep(0.002)


def watch(consumer: Consumer, due: Due) -> list[float]:
    """How much later than due each came."""
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
        retry = txmq.RetryPolicy.table(1, attempts=100)
        with client.consumer(topic, [topic], retry=retry, flood_keys=0) as consumer:
            put_off(consumer, messages - near, time.time() + FAR_S, EACH_S, FAR_UNDER_WAY)
            due = put_off(
                consumer, near, time.time() + near / NACKS_PER_S, 1 / PER_S, NEAR_UNDER_WAY
            )
            largest = rss_anon(pid)
            late = watch(consumer, due)
    return {"rss_anon": largest, "watched": len(late), **latency_us(late)}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
