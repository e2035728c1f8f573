"""What the broker asks of Twisted, as types: the clock, timers, a connection, threads.
Tests pass doubles of just this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twisted.internet.defer import Deferred


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> None: ...
    def active(self) -> int: ...


class Clock(Protocol):
    """Monotonic seconds and timers: the reactor, or `twisted.internet.task.Clock`."""

    def seconds(self) -> float: ...
    def callLater(self, delay: float, callable: Callable[..., object], *args: object) -> Timer: ...  # Twisted's


class Transport(Protocol):
    """The transport of a TCP connection."""

    connected: int
    disconnecting: int

    def write(self, data: bytes) -> None: ...
    def writeSequence(self, data: Iterable[bytes]) -> None: ...  # Twisted's
    def loseConnection(self) -> None: ...
    def abortConnection(self) -> None: ...
    def setTcpNoDelay(self, enabled: bool) -> None: ...  # Twisted's
    def getPeer(self) -> object: ...
    def registerProducer(self, producer: object, streaming: bool) -> None: ...  # Twisted's
    def pauseProducing(self) -> None: ...
    def resumeProducing(self) -> None: ...


class InThread(Protocol):
    """Runs a blocking function in a thread of its kind, one after the other."""

    def __call__(self, function: Callable[..., Any], *args: object) -> Deferred[Any]: ...
