"""The `txmq` command, killed after a number of commits to LMDB."""

from __future__ import annotations

import os
import signal
from itertools import count
from unittest.mock import patch

from lmdb import Environment

from txmq.store.index import environment, lmdb_tables
from txmq.testing.forked import txmq_command


def run(nth: str, *arguments: str) -> None:
    """Run a command, and kill the process after its commit number `nth`."""
    extend_file, commits = environment._extend_file, count(1)

    def dying(env: Environment) -> None:
        if next(commits) == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        extend_file(env)

    with (
        patch.object(environment, "_extend_file", dying),
        patch.object(lmdb_tables, "LOADED_AT_ONCE", 60),
    ):
        txmq_command(*arguments)
