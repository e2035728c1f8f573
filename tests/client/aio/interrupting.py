"""Cancellations at each await of a piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any


class Interrupter:
    """Cancels a task at the n-th await of its own and of the tasks that it begins."""

    def __init__(self) -> None:
        self._left = 0
        self._victim: asyncio.Task[Any] | None = None
        asyncio.get_running_loop().set_task_factory(self._make)

    async def run(self, work: Coroutine[Any, Any, Any], step: int) -> bool:
        """Run the work; return whether it ended before that await."""
        self._left = step
        self._victim = asyncio.get_running_loop().create_task(work)
        try:
            await self._victim
        finally:
            self._victim = None
        return self._left > 0

    def _make(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(self._counted(work), loop=loop, **options)

    async def _counted(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await Awaits(work, self._count)

    def _count(self) -> None:
        if self._victim is not None:
            self._left -= 1
            if not self._left:
                self._victim.cancel()


class Awaits:
    """A coroutine whose awaits are counted."""

    def __init__(self, work: Coroutine[Any, Any, Any], count: Callable[[], None]) -> None:
        self._work, self._count = work, count

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._work.send, None)
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            self._count()
            try:
                step = partial(self._work.send, (yield waits_for))
            except BaseException as error:  # noqa: BLE001  # the coroutine's to handle
                step = partial(self._work.throw, error)
