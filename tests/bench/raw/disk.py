"""Yardstick: append a record to zero-filled space and sync, repeatedly.

    python -m tests.bench.raw.disk FILE COUNT BYTES

Prints {"p50_us", "p99_us"} of write + fdatasync.
"""

from __future__ import annotations

import json
import os
import sys
import time

from tests.bench.raw.latency import latency_us


def preallocate(path: str, size: int) -> int:
    """Return a descriptor at the start of `size` synced zero bytes.

    Data written there changes no metadata.
    """
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
    zeros = bytes(1 << 20)
    for _ in range(-(-size // len(zeros))):
        os.write(fd, zeros)
    os.fsync(fd)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def append_and_sync(fd: int, count: int, size: int) -> list[float]:
    """Return the seconds that each append took until it was on disk."""
    record = os.urandom(size)
    clock, write, fdatasync = time.perf_counter, os.write, os.fdatasync
    took = []
    for _ in range(count):
        began = clock()
        write(fd, record)
        fdatasync(fd)
        took.append(clock() - began)
    return took


def main(path: str, count: int, size: int) -> None:
    """Measure and print."""
    fd = preallocate(path, count * size)
    print(json.dumps(latency_us(append_and_sync(fd, count, size))))
    os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
