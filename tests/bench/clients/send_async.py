"""Send messages of 1 KiB, with at most OUTSTANDING of them without a receipt.

    python -m tests.bench.clients.send_async URL COUNT OUTSTANDING

Prints {"per_s", "frames", "coalesced_share", "cpu_us"}. `coalesced_share` is the share
of messages that shared a frame. `cpu_us` is the CPU time of this process per message.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from concurrent.futures import Future

import txmq

BODY = os.urandom(1024)


def send_all(client: txmq.Client, count: int, outstanding: int) -> None:
    """Wait until all have their receipts. Raises the error of a send."""
    under_way: deque[Future[txmq.Receipt]] = deque()
    for _ in range(count):
        if len(under_way) == outstanding:
            under_way.popleft().result()
        under_way.append(client.send_async("bench", BODY))
    for future in under_way:
        future.result()


def main(url: str, count: int, outstanding: int) -> None:
    """Measure and print."""
    with txmq.connect(url) as client:
        client.send("bench", BODY)
        began, before = time.perf_counter(), time.process_time()
        send_all(client, count, outstanding)
        took, cpu = time.perf_counter() - began, time.process_time() - before
        stats = client.stats
    shares = {"frames": stats.frames, "coalesced_share": stats.coalesced / stats.messages}
    print(json.dumps({"per_s": count / took, "cpu_us": cpu / count * 1e6} | shares))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
