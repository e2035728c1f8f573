"""Consume the messages of one partition, while the first of them may stay outstanding.

    python -m tests.bench.clients.slow URL held|free MESSAGES

Prints {"per_s", "unsettled"}: messages at the end that are not processed. Leases
are short, so that the lease of the first message is extended.
"""

from __future__ import annotations

import json
import sys
import time
from uuid import uuid4

import txmq
from tests.bench.clients.consume_keys import BODY, WITHIN_S

AT_ONCE, LEASE_S = 1_000, 2.0


def measure(url: str, way: str, messages: int) -> dict[str, float]:
    topic = f"bench-{uuid4().hex[:8]}"
    with txmq.connect(url, timeout=WITHIN_S) as client:
        client.call("topic.create", name=topic, partitions=1)
        for first in range(0, messages, AT_ONCE):
            client.send_many(topic, [BODY] * min(AT_ONCE, messages - first))
        with client.consumer(topic, [topic], lease=LEASE_S) as consumer:
            held = consumer.receive(WITHIN_S)
            assert held is not None, "they are all there"
            if way == "free":
                consumer.ack(held)
            began = time.perf_counter()
            for number in range(1, messages):
                message = consumer.receive(WITHIN_S)
                assert message is not None, "they are all there"
                consumer.ack(message, wait=number == messages - 1)
            took = time.perf_counter() - began
            assert consumer.stats.delivered == messages, "none came twice"
            unsettled = client.call("group.show", group=topic)["unsettled"]
    return {"per_s": messages / took, "unsettled": unsettled}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
