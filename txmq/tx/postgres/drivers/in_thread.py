"""A connection that blocks, for rules on an event loop: its statements run in a thread,
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from txmq.faces import run
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.drivers.uninterrupted import uninterrupted


class ThreadDriver:
    """A driver that is awaited, over one that blocks: see Driver."""

    awaits = True

    def __init__(self, driver: Driver, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        """`call` calls a function in the thread."""
        self._driver, self._call = driver, call
        self.interruption: BaseException | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of a driver
        found = getattr(self._driver, name)
        return partial(self._run, found) if iscoroutinefunction(found) else found

    async def _run(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401  # of a driver
        return await self._call(lambda: run(method(*args, **options)))

    async def commit(self, before: str = "") -> str:
        return str(await self._ended(self._driver.commit, before))

    async def prepare(self, gid: str) -> bool:
        return bool(await self._ended(self._driver.prepare, gid))

    async def _ended(self, method: Callable[..., Any], *args: object) -> object:
        found, self.interruption = await uninterrupted(self._run(method, *args), _go_on)
        return found


async def _go_on() -> None:
    """Let the statement run: what comes after it waits in the thread."""
