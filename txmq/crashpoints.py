"""Named places where a test may kill the process, to see that nothing is lost whatever was done by then.

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
_passed = count(1)
_armed = os.environ.get(VARIABLE)  # read once: to look into the environment costs more than all else that is done here


def crashpoint(name: str) -> None:
    """Kills this process with SIGKILL, or stops it, if the environment names this place."""
    if _armed is not None:
        _meet(name, _armed)


def arm(wanted: str) -> None:
    """Names a place as the environment would have; for a process that was forked."""
    global _armed  # noqa: PLW0603 (as the environment, it is the process's)
    _armed = wanted


def _meet(name: str, wanted: str) -> None:
    place, _, rest = wanted.partition(":")
    nth, _, how = rest.partition(":")
    if place == name and next(_passed) == int(nth or 1):
        os.kill(os.getpid(), signal.Signals[f"SIG{how or 'KILL'}"])
