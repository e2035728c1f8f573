"""What the client asks of Twisted, as types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

Reactor: TypeAlias = Any  # several interfaces of Twisted's at once: time, TCP, names


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> None: ...
    def active(self) -> int: ...


class Transport(Protocol):
    """The transport of a TCP connection."""

    def writeSequence(self, data: Iterable[bytes]) -> None: ...  # noqa: N802  # Twisted's
    def abortConnection(self) -> None: ...
    def setTcpNoDelay(self, enabled: bool) -> None: ...  # noqa: FBT001  # Twisted's
    def registerProducer(self, producer: object, streaming: bool) -> None: ...  # noqa: FBT001  # Twisted's
