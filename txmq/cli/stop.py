"""The end of commands that run until they are told to stop."""

from __future__ import annotations

from threading import Event

from txmq.client import signals


def stop_on_signals() -> Event:
    """Return an event that SIGTERM and SIGINT set from now on, instead of ending the
    process.
    """
    stop = Event()
    signals.handle(lambda _number, _frame: stop.set())
    return stop
