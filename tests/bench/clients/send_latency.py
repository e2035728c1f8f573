"""Send messages of 1 KiB for a while, with OUTSTANDING of them without a receipt.

    python -m tests.bench.clients.send_latency URL SECONDS OUTSTANDING

Prints {"per_s", "p50_ms", "p99_ms"}: latencies from the send to the receipt.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from concurrent.futures import Future
from functools import partial

import txmq
from tests.bench.clients.send_async import BODY
from tests.bench.raw.latency import percentile


def main(url: str, seconds: float, outstanding: int) -> None:
    """Measure and print."""
    took: list[float] = []
    under_way: deque[Future[txmq.Receipt]] = deque()
    clock = time.perf_counter

    def note(began: float, _done: Future[txmq.Receipt]) -> None:
        took.append(clock() - began)

    with txmq.connect(url) as client:
        client.send("bench", BODY)
        end = clock() + seconds
        while (began := clock()) < end:
            if len(under_way) == outstanding:
                under_way.popleft().result()
                began = clock()
            future = client.send_async("bench", BODY)
            future.add_done_callback(partial(note, began))
            under_way.append(future)
        for future in under_way:
            future.result()
    took.sort()
    found = {name: percentile(took, part) * 1e3 for name, part in (("p50_ms", 50), ("p99_ms", 99))}
    print(json.dumps({"per_s": len(took) / seconds} | found))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
