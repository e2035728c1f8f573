"""Objects that belong to the process which made them. In the child of a fork their
threads are gone, their sockets are the parent's, and their locks may be held for good.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol
from weakref import WeakSet

from txmq.errors import LocalProtocolError


class OfOneProcess(Protocol):
    """An object that is told in the child of a fork."""

    def after_fork(self) -> None:
        """Start anew, or refuse from now on."""


_objects = WeakSet[OfOneProcess]()


def tell_after_fork(member: OfOneProcess) -> None:
    """Have the object told in each child of a fork, as long as it lives."""
    _objects.add(member)


def forked(kind: str) -> LocalProtocolError:
    """Return the error of an object of that kind which the child of a fork uses."""
    return LocalProtocolError(
        f"the {kind} belongs to the process that made it, and this one was forked from it",
        hint=f"make a {kind} in this process; the client itself may be used",
    )


def _after_fork() -> None:
    for member in list(_objects):
        member.after_fork()


# To compare process ids at every call would cost a system call each time.
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
