"""Crash points: named places where a test may kill the process.

    TXMQ_CRASHPOINT=tx.after_token          dies the first time it gets there
    TXMQ_CRASHPOINT=tx.after_token:3        dies the third time
    TXMQ_CRASHPOINT=tx.after_token:3:STOP   stops there instead, until SIGCONT

Without the variable a crash point does nothing.
"""

from __future__ import annotations

import os
import signal
from itertools import count

VARIABLE = "TXMQ_CRASHPOINT"
UNREAD = ""
_passed = count(1)
# The variable is read once per process: a look at the environment costs more than the
# rest of a crash point.
_armed: str | None = UNREAD


def crashpoint(name: str) -> None:
    """Kill this process with SIGKILL, or stop it, if the environment names this
    place.
    """
    if _armed is not None:
        _meet(name)


def _meet(name: str) -> None:
    global _armed  # noqa: PLW0603  # one per process, like the environment
    _armed = wanted = _armed or os.environ.get(VARIABLE)
    if wanted is None:
        return
    place, _, rest = wanted.partition(":")
    nth, _, how = rest.partition(":")
    if place == name and next(_passed) == int(nth or 1):
        signal.raise_signal(signal.Signals[f"SIG{how or 'KILL'}"])  # at this very thread


def _forget() -> None:
    # The parent may change the variable before it forks.
    global _armed  # noqa: PLW0603  # likewise
    _armed = UNREAD


os.register_at_fork(after_in_child=_forget)
