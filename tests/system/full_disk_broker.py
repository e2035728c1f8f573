"""The `txmq` command on a disk that is full for as long as a file exists."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

from txmq.store.filesystem import RealFile, store_error
from txmq.testing.forked import txmq_command


def run(flag: str, *arguments: str) -> None:
    """Run the command with these arguments. The disk is full while the file `flag`
    exists.
    """
    write_zeros = RealFile.write_zeros

    def write_unless_full(file: RealFile, offset: int, length: int) -> None:
        if Path(flag).exists():
            raise store_error(
                "writing", "the log", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            )
        write_zeros(file, offset, length)

    with patch.object(
        RealFile, "write_zeros", write_unless_full
    ):  # the only call that allocates space
        txmq_command(*arguments)
