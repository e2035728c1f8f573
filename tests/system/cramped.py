"""`python -m tests.system.cramped FLAG broker ...`: as `txmq`, on a disk that is full while the file FLAG exists."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from unittest.mock import patch

from txmq.cli.app import main
from txmq.store.fs import RealFile, store_error


def run(flag: Path) -> None:
    """Runs the command with what is left of the arguments."""
    write_zeros = RealFile.write_zeros

    def cramped(file: RealFile, offset: int, length: int) -> None:
        if flag.exists():
            raise store_error("writing", "the log", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        write_zeros(file, offset, length)

    with patch.object(RealFile, "write_zeros", cramped):  # the one call that makes room
        main()


if __name__ == "__main__":
    run(Path(sys.argv.pop(1)))
