"""Send messages of 1 KiB to random topics: 64 sends outstanding, or batches of BATCH
one by one.

    python -m tests.bench.clients.many_topics URL TOPICS COUNT BATCH BROKER

Prints {"per_s", "cpu_us"}. `cpu_us` is the CPU time per message of this process and of
the process with the id BROKER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from concurrent.futures import Future
from random import Random

import txmq
from tests.bench.brokers import cpu_s

BODY = os.urandom(1_024)
OUTSTANDING = 64


def singles(client: txmq.Client, names: list[str]) -> None:
    """Send one message to each of the topics, in this order."""
    under_way: deque[Future[txmq.Receipt]] = deque()
    for name in names:
        if len(under_way) == OUTSTANDING:
            under_way.popleft().result()
        under_way.append(client.send_async(name, BODY))
    for future in under_way:
        future.result()


def main(url: str, topics: int, count: int, batch: int, broker: int) -> None:
    """Measure and print."""
    random = Random(1)
    names = [f"bench-{random.randrange(topics)}" for _ in range(count // batch)]
    with txmq.connect(url) as client:
        # the first request for the metadata of a topic is not measured
        for name in dict.fromkeys(names):
            client._core.topics.get(name)
        began, before = time.perf_counter(), time.process_time() + cpu_s(broker)
        if batch == 1:
            singles(client, names)
        else:
            bodies = [BODY] * batch
            for name in names:
                client.send_many(name, bodies)
        took, cpu = time.perf_counter() - began, time.process_time() + cpu_s(broker) - before
    print(json.dumps({"per_s": count / took, "cpu_us": cpu / count * 1e6}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
