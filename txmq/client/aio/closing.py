"""A base of objects that are closed at the end of an `async with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from types import TracebackType
from typing import Self


class AsyncCloseable(ABC):
    """An object for `async with`, closed at the end of the block."""

    @abstractmethod
    def close(self) -> Awaitable[None]:
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
