"""Types of Twisted's objects, and a base of objects that Twisted programs close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from twisted.internet.defer import Deferred

Reactor: TypeAlias = Any  # several of Twisted's interfaces at once: time, TCP, names


class DelayedCall(Protocol):
    """A call that the reactor makes later."""

    def cancel(self) -> None: ...
    def active(self) -> int: ...


class TcpTransport(Protocol):
    """The transport of a TCP connection."""

    def writeSequence(self, data: Iterable[bytes]) -> None: ...  # noqa: N802  # Twisted's
    def unregisterProducer(self) -> None: ...  # noqa: N802
    def abortConnection(self) -> None: ...
    def loseConnection(self) -> None: ...
    def setTcpNoDelay(self, enabled: bool) -> None: ...  # noqa: FBT001  # Twisted's
    def registerProducer(self, producer: object, streaming: bool) -> None: ...  # noqa: FBT001


class AsyncCloseable(ABC):
    """An object for `async with`, closed at the end of the block."""

    @abstractmethod
    def close(self) -> Deferred[None]:
        """Close the object."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
