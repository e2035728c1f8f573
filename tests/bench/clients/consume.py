"""Consume a backlog, in batches or message by message, and ack all of it.

    python -m tests.bench.clients.consume URL COUNT batches|messages

Prints {"per_s", "cpu_us"}. `cpu_us` is the CPU time of this process per message. The
measurement ends when the last ack is in the log of the broker.
"""

from __future__ import annotations

import json
import sys
import time

import txmq
from txmq.client.blocking.consumer.consumer import Consumer

WITHIN_S = 60.0


def by_batches(consumer: Consumer, count: int) -> None:
    left = count
    while left:
        batch = consumer.receive_batch(WITHIN_S)
        if batch is None:
            raise TimeoutError(f"{left} messages did not come")
        left -= len(batch.bodies)
        consumer.ack_batch(batch, wait=not left)


def by_messages(consumer: Consumer, count: int) -> None:
    left = count
    for message in consumer:
        left -= 1
        consumer.ack(message, wait=not left)
        if not left:
            return


def main(url: str, count: int, how: str) -> None:
    """Measure and print."""
    with (
        txmq.connect(url) as client,
        client.consumer("bench", ["bench"], start="first") as consumer,
    ):
        began, before = time.perf_counter(), time.process_time()
        {"batches": by_batches, "messages": by_messages}[how](consumer, count)
        took, cpu = time.perf_counter() - began, time.process_time() - before
    print(json.dumps({"per_s": count / took, "cpu_us": cpu / count * 1e6}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
