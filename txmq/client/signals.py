"""Consumers end at SIGTERM and SIGINT, where their program asks for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Protocol
from weakref import WeakSet

from txmq.errors import LocalProtocolError

NUMBERS = (signal.SIGTERM, signal.SIGINT)
Handler = Callable[[int, FrameType | None], None]


class Stoppable(Protocol):
    """The members of a consumer, which deliver nothing more then, in any thread."""

    def stop_soon(self) -> None: ...


_to_stop = WeakSet[Stoppable]()
_owner = 0  # the process that asked: its children only have copies


def stop_on_signals(members: Stoppable) -> None:
    """Have these members deliver nothing more from the first signal on. A second one
    ends the process, as signals do. Raises LocalProtocolError outside the main thread.
    """
    global _owner  # noqa: PLW0603  # signals are the process's
    if current_thread() is not main_thread():
        raise LocalProtocolError(
            "only the main thread may say what signals do",
            hint="call stop_on_signals() there, or close the consumer yourself",
        )
    _owner = os.getpid()
    _to_stop.add(members)
    handle(_stop)


def handle(handler: Handler | signal.Handlers) -> None:
    """Handle both signals from now on, but for one that the process was started
    without, as a shell starts a background job without SIGINT.
    """
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    handle(signal.SIG_DFL)
    if os.getpid() != _owner:
        os.kill(os.getpid(), number)
        return
    # in a thread, because this one may hold the lock of a consumer just now
    Thread(target=_stop_all, name="txmq-stop").start()


def _stop_all() -> None:
    for members in list(_to_stop):
        members.stop_soon()
