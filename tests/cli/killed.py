"""The `txmq` command, killed once it has written to LMDB so many times."""

from __future__ import annotations

import os
import signal
from itertools import count
from unittest.mock import patch

from lmdb import Environment

from txmq.store import environment, index
from txmq.testing.forked import txmq_command


def run(nth: str, *arguments: str) -> None:
    """The number of the commit after which it dies, and the command's arguments."""
    keep_long_enough, commits = environment._keep_long_enough, count(1)

    def dying(env: Environment) -> None:
        if next(commits) == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        keep_long_enough(env)

    with (
        patch.object(environment, "_keep_long_enough", dying),
        patch.object(index, "LOADED_AT_ONCE", 60),
    ):
        txmq_command(*arguments)
