"""The `txmq` command on a disk that is full for as long as a file exists."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

from txmq.store.fs import RealFile, store_error
from txmq.testing.forked import txmq_command


def run(flag: str, *arguments: str) -> None:
    """The file's name, and the command's arguments."""
    write_zeros = RealFile.write_zeros

    def cramped(file: RealFile, offset: int, length: int) -> None:
        if Path(flag).exists():
            raise store_error(
                "writing", "the log", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            )
        write_zeros(file, offset, length)

    with patch.object(RealFile, "write_zeros", cramped):  # the one call that makes room
        txmq_command(*arguments)
