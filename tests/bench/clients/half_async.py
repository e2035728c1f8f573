"""Half messages of 1 KiB that a checker would answer for, each stored and then
committed, by a client's `half_async`.

python -m tests.bench.clients.half_async URL COUNT OUTSTANDING

Never more than OUTSTANDING transactions are under way, from the half to the answer to
its commit. Prints {"per_s", "per_frame", "cpu_us"}: groups, or decisions, in a frame;
what this process computed for a transaction.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from concurrent.futures import Future

import txmq
from txmq.client.blocking.transaction.half_message import HalfMessage

BODY = os.urandom(1024)
Half = HalfMessage[Future[bool]]


def commit_all(client: txmq.Client, count: int, outstanding: int) -> None:
    """Returns when all of them are committed. Raises what one of them met."""
    each = max(1, outstanding // 2)  # halves on their way, and as many commits
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
