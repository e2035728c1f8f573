"""Named places where a test may kill the process, to see that nothing is lost whatever
was done by then.

    TXMQ_CRASHPOINT=tx.after_token          dies the first time it gets there
    TXMQ_CRASHPOINT=tx.after_token:3        the third time
    TXMQ_CRASHPOINT=tx.after_token:3:STOP   stops there instead, until somebody lets it go on (SIGCONT)

Without the variable a crash point does nothing.
"""

from __future__ import annotations

import os
import signal
from itertools import count

VARIABLE = "TXMQ_CRASHPOINT"
UNREAD = ""
_passed = count(1)
_armed: str | None = (
    UNREAD  # read once in each process: to look there costs more than all else that is done here
)


def crashpoint(name: str) -> None:
    """Kills this process with SIGKILL, or stops it, if the environment names this
    place.
    """
    if _armed is not None:
        _meet(name)


def _meet(name: str) -> None:
    global _armed
    _armed = wanted = _armed or os.environ.get(VARIABLE)
    if wanted is None:
        return
    place, _, rest = wanted.partition(":")
    nth, _, how = rest.partition(":")
    if place == name and next(_passed) == int(nth or 1):
        os.kill(os.getpid(), signal.Signals[f"SIG{how or 'KILL'}"])


def _forget() -> None:
    """A child of a fork may be told something else."""
    global _armed
    _armed = UNREAD


os.register_at_fork(after_in_child=_forget)
