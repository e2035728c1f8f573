"""A base of objects that Twisted programs close at the end of an `async with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from twisted.internet.defer import Deferred


class TwistedCloseable(ABC):
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
