"""Send one message of 1 KiB at a time and wait for each receipt.

    python -m tests.bench.clients.send_one URL COUNT

Prints {"p50_us", "p99_us", "cpu_us"}. `cpu_us` is the CPU time of this process per
send.
"""

from __future__ import annotations

import json
import os
import sys
import time

import txmq
from tests.bench.raw.latency import latency_us

BODY = os.urandom(1024)
WARM_UP = 50


def sends(client: txmq.Client, count: int) -> list[float]:
    """Return the seconds from each call to its receipt."""
    clock, send = time.perf_counter, client.send
    took = []
    for _ in range(count):
        began = clock()
        send("bench", BODY)
        took.append(clock() - began)
    return took


def main(url: str, count: int) -> None:
    """Measure and print."""
    with txmq.connect(url) as client:
        sends(client, WARM_UP)
        before = time.process_time()
        took = sends(client, count)
        cpu_us = (time.process_time() - before) / count * 1e6
    print(json.dumps(latency_us(took) | {"cpu_us": cpu_us}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
