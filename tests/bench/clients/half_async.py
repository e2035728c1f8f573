"""Store half messages of 1 KiB with a checker and commit each, by `half_async` of a
client.

    python -m tests.bench.clients.half_async URL COUNT OUTSTANDING

Prints {"per_s", "per_frame", "cpu_us"}. At most OUTSTANDING transactions are under way,
from the half to the answer to its commit. `per_frame` counts bundles, or decisions, per
frame; `cpu_us` is the CPU time of this process per transaction.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from concurrent.futures import Future

import txmq
from txmq.client.protocol.transaction.half_message import HalfMessage

BODY = os.urandom(1024)
Half = HalfMessage[Future[bool]]


def commit_all(client: txmq.Client, count: int, outstanding: int) -> None:
    """Wait until all of them are committed. Raises the error of any of them."""
    each = max(1, outstanding // 2)  # halves in flight, and as many commits
    halves: deque[Future[Half]] = deque()
    commits: deque[Future[bool]] = deque()
    for _ in range(count):
        if len(halves) == each:
            if len(commits) == each:
                commits.popleft().result()
            commits.append(halves.popleft().result().commit())
        halves.append(client.half_async("bench", BODY, checker="bench"))
    commits.extend(half.result().commit() for half in halves)
    for commit in commits:
        commit.result()


def main(url: str, count: int, outstanding: int) -> None:
    """Measure and print."""
    with txmq.connect(url, service="bench") as client:
        client.send("bench", BODY)
        began, before = time.perf_counter(), time.process_time()
        commit_all(client, count, outstanding)
        took, cpu = time.perf_counter() - began, time.process_time() - before
        stats = client.stats
    print(
        json.dumps(
            {
                "per_s": count / took,
                "per_frame": stats.requests / max(1, stats.bundles),
                "cpu_us": cpu / count * 1e6,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
