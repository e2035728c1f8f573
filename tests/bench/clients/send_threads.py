"""Send messages of 1 KiB in several threads, each waiting for its receipts.

    python -m tests.bench.clients.send_threads URL COUNT THREADS

Prints {"per_s", "p50_us", "p99_us"}.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import txmq
from tests.bench.clients.send_one import sends
from tests.bench.raw.latency import latency_us


def main(url: str, count: int, threads: int) -> None:
    """Measure and print."""
    with (
        txmq.connect(url, connections=threads, timeout=30.0) as client,
        ThreadPoolExecutor(threads) as executor,
    ):
        list(executor.map(lambda _: sends(client, 5), range(threads)))
        began = time.perf_counter()
        took = [
            one
            for took in executor.map(lambda _: sends(client, count // threads), range(threads))
            for one in took
        ]
        per_s = len(took) / (time.perf_counter() - began)
    print(json.dumps({"per_s": per_s} | latency_us(took)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
