"""Send messages as columns for SECONDS, with KEYS different keys (0: no keys).

    python -m tests.bench.clients.send_many URL SECONDS BYTES KEYS

Prints {"per_s", "mb_per_s"}.
"""

from __future__ import annotations

import json
import os
import sys
import time

import txmq

CALL_BYTES = 16 << 20  # messages of one call, in several batches


def main(url: str, seconds: float, size: int, different: int) -> None:
    """Measure and print."""
    bodies = [os.urandom(size) for _ in range(CALL_BYTES // (size + 64))]
    keys = [f"customer-{n % different}" for n in range(len(bodies))] if different else None
    with txmq.connect(url) as client:
        client.send_many("bench", bodies[:100])
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            client.send_many("bench", bodies, keys)
            calls += 1
        per_s = calls * len(bodies) / (time.perf_counter() - began)
    print(json.dumps({"per_s": per_s, "mb_per_s": per_s * size / 1e6}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
