"""Fill a backlog of MESSAGES of 100 bytes with different keys; then read at random
offsets, and search by key.

    python -m tests.bench.clients.search URL MESSAGES SAMPLES

Prints {"fetch_p50_us", "fetch_p99_us", "find_..."}. The samples begin when nearly all
of the log is catalogued.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from random import Random

import txmq
from tests.bench.raw.latency import latency_us
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Opcode, Read, pack_read

TOPIC, PARTITIONS, AT_ONCE, BODY = "bench-find", 8, 100_000, bytes(100)
LITTLE = 1 << 20  # bytes at the end of the log that may have no catalogue
WITHIN_S = 3_600.0


def fill(client: txmq.Client, messages: int) -> None:
    """Send the messages in large batches."""
    client.call("topic.create", name=TOPIC, partitions=PARTITIONS)
    for first in range(0, messages, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, messages))
        client.send_many(
            TOPIC, [BODY] * len(numbers), keys=[f"order-{number}" for number in numbers]
        )
    deadline = time.monotonic() + WITHIN_S
    while (
        client.call("broker.stats")["log"]["uncatalogued"] > LITTLE and time.monotonic() < deadline
    ):
        time.sleep(0.5)


def timed(samples: int, look: Callable[[], None]) -> list[float]:
    took = []
    for _ in range(samples):
        began = time.perf_counter()
        look()
        took.append(time.perf_counter() - began)
    return took


def main(url: str, messages: int, samples: int) -> None:
    """Measure and print."""
    rng = Random(1)
    with txmq.connect(url, timeout=60.0) as client:
        fill(client, messages)
        ends = client.call("topic.show", name=TOPIC)["ends"]

        def fetch() -> None:
            partition = rng.randrange(PARTITIONS)
            wanted = Read(partition, rng.randrange(ends[partition]), 0, 1, TOPIC)
            assert unpack_chunks(client._core.request(Opcode.READ, pack_read(wanted))).chunks

        def find() -> None:
            key = f"order-{rng.randrange(messages)}"
            assert [found.key for found in client.find(TOPIC, key=key)] == [key]

        fetched, found = latency_us(timed(samples, fetch)), latency_us(timed(samples, find))
    figures = {f"fetch_{name}": value for name, value in fetched.items()}
    print(json.dumps(figures | {f"find_{name}": value for name, value in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
