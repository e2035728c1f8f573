"""The `txmq` command on a disk that takes a fixed time for a sync, and a time for each
byte that was written before it.

    python -m tests.system.slow_disk_broker FIXED_MS MIB_PER_S ARGUMENTS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from unittest.mock import patch

from txmq.store.filesystem import Bytes, RealFile
from txmq.testing.forked import txmq_command


def run(fixed_ms: str, mib_per_s: str, *arguments: str) -> None:
    """Run the command with these arguments."""
    fixed_s, rate = float(fixed_ms) / 1e3, float(mib_per_s) * (1 << 20)
    pwrite, fdatasync = RealFile.pwrite, RealFile.fdatasync
    write_zeros = RealFile.write_zeros
    written: dict[int, range] = {}  # by file: what the next sync brings to disk

    def note(file: RealFile, start: int, length: int) -> None:
        before = written.get(id(file), range(start, start))
        written[id(file)] = range(min(before.start, start), max(before.stop, start + length))

    def noted(file: RealFile, buffers: Sequence[Bytes], offset: int) -> None:
        note(file, offset, sum(map(len, buffers)))
        pwrite(file, buffers, offset)

    def noted_zeros(file: RealFile, offset: int, length: int) -> None:
        note(file, offset, length)
        write_zeros(file, offset, length)

    def slow(file: RealFile) -> None:
        time.sleep(fixed_s + len(written.pop(id(file), ())) / rate)
        fdatasync(file)

    with (
        patch.object(RealFile, "pwrite", noted),
        patch.object(RealFile, "write_zeros", noted_zeros),
        patch.object(RealFile, "fdatasync", slow),
    ):
        txmq_command(*arguments)


if __name__ == "__main__":
    run(*sys.argv[1:])
