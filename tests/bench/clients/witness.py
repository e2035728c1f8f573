"""Send messages one by one, with a pause between them, as a client that does nothing
wrong.

    python -m tests.bench.clients.witness URL TOPIC SECONDS

Prints {"sent", "refused", "p50_ms", "p99_ms", "max_ms"}.
"""

from __future__ import annotations

import json
import sys
import time

import txmq
from txmq.errors import TxmqError

PAUSE_S = 0.005


def main(url: str, topic: str, seconds: float) -> None:
    """Measure and print."""
    took: list[float] = []
    refused = 0
    with txmq.connect(url, timeout=60.0) as client:
        client.send(topic, b"the first one")
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            try:
                client.send(topic, b"witness")
            except TxmqError:
                refused += 1
            took.append((time.perf_counter() - began) * 1e3)
            time.sleep(PAUSE_S)
    took.sort()
    print(
        json.dumps(
            {
                "sent": len(took) - refused,
                "refused": refused,
                "p50_ms": took[len(took) // 2],
                "p99_ms": took[len(took) * 99 // 100],
                "max_ms": took[-1],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
