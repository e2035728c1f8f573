"""Consume messages one by one while some of them go to the local store.

    python -m tests.bench.clients.consume_stored URL DIRECTORY MESSAGES EVERY

Prints {"per_s", "cpu_us"}. One message of EVERY fails; 0 = none, and no store. The
stored ones are due after the measurement.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any
from uuid import uuid4

import txmq
from tests.bench.clients.consume_keys import WITHIN_S, fill

KEYS, LATER_S = 10_000, 3_600.0


def measure(url: str, directory: str, messages: int, every: int) -> dict[str, float]:
    topic = f"bench-{uuid4().hex[:8]}"
    store: Any = {"on_failure": "local", "local_store": directory} if every else {}
    store["flood_keys"] = 0  # they all fail alike
    with txmq.connect(url, timeout=WITHIN_S) as client:
        fill(client, topic, KEYS, messages)
        with client.consumer(topic, [topic], **store) as consumer:
            began, computed = time.perf_counter(), time.process_time()
            for number in range(messages):
                message = consumer.receive(WITHIN_S)
                assert message is not None, "they are all there"
                if every and number % every == every - 1:
                    consumer.nack(message, LATER_S, "failed")
                else:
                    consumer.ack(message)
            took, computed = time.perf_counter() - began, time.process_time() - computed
            while every and consumer.stats.stored < messages // every:
                time.sleep(0.01)
    return {"per_s": messages / took, "cpu_us": computed / messages * 1e6}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
