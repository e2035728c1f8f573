"""Send messages of 1 KiB from OUTSTANDING tasks of asyncio, each waiting for its
receipt.

    python -m tests.bench.clients.send_64_aio URL COUNT OUTSTANDING asyncio|uvloop

Prints {"per_s", "cpu_us"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from itertools import count

import uvloop

import txmq.aio

BODY = os.urandom(1024)
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def one_after_another(client: txmq.aio.Client, numbers: count[int], most: int) -> None:
    """Send while there is a number below `most`."""
    while next(numbers) < most:
        await client.send("bench", BODY)


async def measure(url: str, most: int, outstanding: int) -> None:
    """Measure and print."""
    async with txmq.aio.connect(url) as client:
        await client.send("bench", BODY)
        numbers, began, before = count(), time.perf_counter(), time.process_time()
        await asyncio.gather(
            *(one_after_another(client, numbers, most) for _ in range(outstanding))
        )
        took, cpu = time.perf_counter() - began, time.process_time() - before
    print(json.dumps({"per_s": most / took, "cpu_us": cpu / most * 1e6}))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=LOOPS[sys.argv[4]]) as runner:
        runner.run(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
