"""Send messages of 1 KiB from OUTSTANDING coroutines of the Twisted client, each
waiting for its receipt.

    python -m tests.bench.clients.send_64_twisted URL COUNT OUTSTANDING

Prints {"per_s", "cpu_us"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import react

import txmq.twisted

BODY = os.urandom(1024)


async def one_after_another(client: txmq.twisted.Client, numbers: count[int], most: int) -> None:
    """Send while there is a number below `most`."""
    while next(numbers) < most:
        await client.send("bench", BODY)


async def measure(reactor: Any, url: str, most: int, outstanding: int) -> None:
    """Measure and print."""
    client = txmq.twisted.connect(reactor, url)
    await client.send("bench", BODY)
    numbers, began, before = count(), time.perf_counter(), time.process_time()
    workers = (one_after_another(client, numbers, most) for _ in range(outstanding))
    await gatherResults([Deferred.fromCoroutine(worker) for worker in workers])
    took, cpu = time.perf_counter() - began, time.process_time() - before
    print(json.dumps({"per_s": most / took, "cpu_us": cpu / most * 1e6}))
    await client.close()


def main(reactor: Any, url: str, most: str, outstanding: str) -> Deferred[None]:
    """Run the measurement in the reactor."""
    return Deferred.fromCoroutine(measure(reactor, url, int(most), int(outstanding)))


if __name__ == "__main__":
    react(main, sys.argv[1:])
