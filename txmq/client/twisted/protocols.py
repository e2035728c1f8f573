"""What the client asks of Twisted, as types, and what it gives back to programs on
Twisted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from twisted.internet.defer import Deferred

Reactor: TypeAlias = Any  # several interfaces of Twisted's at once: time, TCP, names


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> None: ...
    def active(self) -> int: ...


class Transport(Protocol):
    """The transport of a TCP connection."""

    def writeSequence(self, data: Iterable[bytes]) -> None: ...  # Twisted's
    def abortConnection(self) -> None: ...
    def setTcpNoDelay(self, enabled: bool) -> None: ...  # Twisted's
    def registerProducer(self, producer: object, streaming: bool) -> None: ...  # Twisted's


class Closing(ABC):
    """For use with `async with`: it is closed at the end of the block."""

    @abstractmethod
    def close(self) -> Deferred[None]:
        """Ends it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
