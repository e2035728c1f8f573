"""Consume messages of many keys one by one, and ack each.

    python -m tests.bench.clients.consume_keys URL MODE KEYS MESSAGES

Prints {"per_s", "cpu_us"}. All messages are sent before the measurement. `cpu_us` is
the CPU time of the client per message.
"""

from __future__ import annotations

import json
import sys
import time
from uuid import uuid4

import txmq

PARTITIONS, AT_ONCE, BODY = 8, 10_000, bytes(100)
WITHIN_S = 60.0


def fill(client: txmq.Client, topic: str, keys: int, messages: int) -> None:
    """Send the messages, each key in turn."""
    client.call("topic.create", name=topic, partitions=PARTITIONS)
    for first in range(0, messages, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, messages))
        client.send_many(
            topic, [BODY] * len(numbers), keys=[f"k{number % keys}" for number in numbers]
        )


def measure(url: str, mode: str, keys: int, messages: int) -> dict[str, float]:
    topic = f"bench-{uuid4().hex[:8]}"
    with txmq.connect(url, timeout=WITHIN_S) as client:
        fill(client, topic, keys, messages)
        with client.consumer(topic, [topic], mode=mode) as consumer:  # type: ignore[arg-type]  # one of the modes
            began, computed = time.perf_counter(), time.process_time()
            for _ in range(messages):
                message = consumer.receive(WITHIN_S)
                assert message is not None, "they are all there"
                consumer.ack(message)
            took, computed = time.perf_counter() - began, time.process_time() - computed
    return {"per_s": messages / took, "cpu_us": computed / messages * 1e6}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
