"""Yardstick: append groups of records to a zero-filled file, with a sync for each.

    python -m tests.bench.raw.group_file FILE COUNT BYTES GROUP

Prints {"per_s"} of the records.
"""

from __future__ import annotations

import json
import os
import sys
import time

from tests.bench.raw.disk import preallocate


def main(path: str, count: int, size: int, group: int) -> None:
    """Measure and print."""
    fd = preallocate(path, count * size)
    records = os.urandom(size) * group
    began = time.perf_counter()
    for _ in range(count // group):
        os.write(fd, records)
        os.fdatasync(fd)
    took = time.perf_counter() - began
    print(json.dumps({"per_s": count // group * group / took}))
    os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
