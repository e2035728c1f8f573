"""Send one message of 1 KiB at a time by the Twisted client and wait for each receipt.

    python -m tests.bench.clients.send_one_twisted URL COUNT

Prints {"p50_us", "p99_us"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react

import txmq.twisted
from tests.bench.raw.latency import latency_us

BODY = os.urandom(1024)
WARM_UP = 50


async def sends(client: txmq.twisted.Client, count: int) -> list[float]:
    """Return the seconds from each call to its receipt."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        await client.send("bench", BODY)
        took.append(time.perf_counter() - began)
    return took


async def measure(reactor: Any, url: str, count: int) -> None:
    """Measure and print."""
    client = txmq.twisted.connect(reactor, url)
    await sends(client, WARM_UP)
    print(json.dumps(latency_us(await sends(client, count))))
    await client.close()


def main(reactor: Any, url: str, count: int) -> Deferred[None]:
    """Run the measurement in the reactor."""
    return Deferred.fromCoroutine(measure(reactor, url, count))


if __name__ == "__main__":
    react(main, (sys.argv[1], int(sys.argv[2])))
