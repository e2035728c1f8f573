"""Use a consumer's local store: put messages of 1 KiB, fill it, or open a full one.

    python -m tests.bench.clients.local_store put DIRECTORY COUNT OUTSTANDING
    python -m tests.bench.clients.local_store fill DIRECTORY COUNT
    python -m tests.bench.clients.local_store open DIRECTORY

`put` prints {"per_s"}: OUTSTANDING messages are under way, in puts of several threads.
`open` prints {"seconds", "messages", "rss"}, interpreter excluded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from tests.bench.harness import rss_anon
from txmq.model.retry import FailureReport
from txmq.recover.local import LocalStore, Place, StoredMessage, StoreLimits, StoreOwner

OWNER = StoreOwner("bench", "bench", 1, UUID(int=1), ordered=True)
LIMITS = StoreLimits(bytes=1 << 40, messages=1 << 30)
FAILURE = FailureReport("ValueError", "no such carrier", "bench", ())
THREADS, KEYS, SMALL, AT_ONCE = 4, 9_973, 128, 1_000


def now() -> int:
    return time.time_ns() // 1_000


def open_store(directory: str) -> LocalStore:
    return LocalStore.open(directory, OWNER, LIMITS, now=now)[0]


def stored(offset: int, body: bytes) -> tuple[StoredMessage, int, FailureReport]:
    place, name = Place(1, offset % 8, offset), f"{'0' * 32}-{offset}"
    key = f"key {offset % KEYS}"
    return StoredMessage(place, key, None, {}, body, name, 1, 1, 1, 1), offset, FAILURE


def put(directory: str, count: int, outstanding: int) -> dict[str, float]:
    """Return the rate of puts that are on disk at their return."""
    store, size, body = open_store(directory), outstanding // THREADS, os.urandom(1_024)
    batches = [[stored(at + n, body) for n in range(size)] for at in range(0, count, size)]
    shares = [batches[thread::THREADS] for thread in range(THREADS)]

    def put_all(share: list[list[tuple[StoredMessage, int, FailureReport]]]) -> None:
        for batch in share:
            store.put(batch)

    with ThreadPoolExecutor(THREADS) as executor:
        began = time.perf_counter()
        list(executor.map(put_all, shares))
        seconds = time.perf_counter() - began
    store.close()
    return {"per_s": len(batches) * size / seconds}


def fill(directory: str, count: int) -> dict[str, float]:
    store, body = open_store(directory), os.urandom(SMALL)
    for first in range(0, count, AT_ONCE):
        store.put([stored(first + n, body) for n in range(min(AT_ONCE, count - first))])
    store.close()
    return {}


def reopen(directory: str) -> dict[str, float]:
    """Return the time until the first messages are handed out, and the memory then."""
    began = time.perf_counter()
    store = open_store(directory)
    assert store.due(now(), 100)
    seconds = time.perf_counter() - began
    figures = {
        "seconds": seconds,
        "messages": store.stats().messages,
        "rss": rss_anon(os.getpid()),
    }
    store.close()
    return figures


if __name__ == "__main__":
    doing, directory, *numbers = sys.argv[1:]
    runs: dict[str, Callable[..., dict[str, float]]] = {"put": put, "fill": fill, "open": reopen}
    print(json.dumps(runs[doing](directory, *map(int, numbers))))
