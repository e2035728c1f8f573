"""Send messages through a producer's spool.

    python -m tests.bench.clients.spool store DIR COUNT OUTSTANDING   1 KiB, no broker
    python -m tests.bench.clients.spool drain DIR COUNT URL           100 B each
    python -m tests.bench.clients.spool direct COUNT URL              the same, without

Prints {"per_s"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from concurrent.futures import Future

import txmq

NOWHERE = "txmq://127.0.0.1:1"
BODY, SMALL = os.urandom(1024), os.urandom(100)


def store(directory: str, count: int, outstanding: int) -> float:
    """Return the rate at which messages get on disk."""
    with txmq.connect(NOWHERE, spool=directory, spool_bytes=1 << 40, timeout=0.5) as client:
        client.send("bench", BODY, partition=0)  # which notices that there is no broker
        under_way: deque[Future[txmq.Receipt]] = deque()
        began = time.perf_counter()
        for _ in range(count):
            if len(under_way) == outstanding:
                under_way.popleft().result()
            under_way.append(client.send_async("bench", BODY, partition=0))
        for future in under_way:
            future.result()
        return count / (time.perf_counter() - began)


def send_all(client: txmq.Client, count: int) -> None:
    """Send small messages as fast as the window allows."""
    for _ in range(count):
        client.send_async("bench", SMALL, timeout=60.0)
    client.flush(600.0)


def drain(directory: str, count: int, url: str) -> float:
    """Return the rate at which a full spool is sent."""
    with txmq.connect(url, spool=directory) as client:
        client.send("bench", SMALL)  # so that the topic is known later
    with txmq.connect(NOWHERE, spool=directory, spool_bytes=1 << 40, timeout=0.5) as client:
        send_all(client, count)
    began = time.perf_counter()
    with txmq.connect(url, spool=directory, spool_bytes=1 << 40) as client:
        client.spool.wait(600.0)
        return count / (time.perf_counter() - began)


def direct(count: int, url: str) -> float:
    """Return the rate of the same messages without a spool."""
    with txmq.connect(url) as client:
        client.send("bench", SMALL)
        began = time.perf_counter()
        send_all(client, count)
        return count / (time.perf_counter() - began)


def main(doing: str, *arguments: str) -> None:
    """Measure and print."""
    match doing, *arguments:
        case "store", directory, count, outstanding:
            per_s = store(directory, int(count), int(outstanding))
        case "drain", directory, count, url:
            per_s = drain(directory, int(count), url)
        case "direct", count, url:
            per_s = direct(int(count), url)
        case _:
            sys.exit(__doc__)
    print(json.dumps({"per_s": per_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
