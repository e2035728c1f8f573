"""The end of commands that run until they are told to stop."""

from __future__ import annotations

import signal
from threading import Event


def stop_on_signals() -> Event:
    """Return an event that SIGTERM and SIGINT set from now on, instead of ending the
    process.
    """
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    return stop
