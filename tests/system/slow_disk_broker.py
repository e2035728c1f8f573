"""The `txmq` command on a disk that takes a fixed time for a sync, and a time for each
byte that was written before it.

    python -m tests.system.slow_disk_broker FIXED_MS MIB_PER_S ARGUMENTS
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

from txmq.store.filesystem import Bytes, RealFile
from txmq.testing.forked import txmq_command


def run(fixed_ms: str, mib_per_s: str, *arguments: str) -> None:
    """Run the command with these arguments."""
    fixed_s, rate = float(fixed_ms) / 1e3, float(mib_per_s) * (1 << 20)
    pwrite, fdatasync = RealFile.pwrite, RealFile.fdatasync
    written: Counter[int] = Counter()  # bytes, by file

    def noted(file: RealFile, buffers: Sequence[Bytes], offset: int) -> None:
        written[id(file)] += sum(map(len, buffers))
        pwrite(file, buffers, offset)

    def slow(file: RealFile) -> None:
        time.sleep(fixed_s + written.pop(id(file), 0) / rate)
        fdatasync(file)

    with patch.object(RealFile, "pwrite", noted), patch.object(RealFile, "fdatasync", slow):
        txmq_command(*arguments)


if __name__ == "__main__":
    run(*sys.argv[1:])
