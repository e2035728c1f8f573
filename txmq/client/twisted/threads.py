"""A thread for what blocks, of a transaction or of a worker with an inbox.

Each has one of its own: it keeps its connection to the database, and one that waits for
a row lock leaves the others theirs to commit in. It is a daemon: a program that ends
does not wait for a statement or a handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class OneThread:
    """Calls in a thread, one after the other. The first one begins the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of a function, after all calls before. For the loop.

        Where the wait is cancelled, a call that has begun goes on.
        """
        loop, context = asyncio.get_running_loop(), copy_context()
        answer: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            if answer.cancelled():
                return
            try:
                found = context.run(function)
            except BaseException as failure:  # noqa: BLE001  # the caller's
                loop.call_soon_threadsafe(_fail, answer, failure)
            else:
                loop.call_soon_threadsafe(_resolve, answer, found)

        if self._calls is None:
            self._calls = SimpleQueue()
            Thread(target=_work, args=(self._calls,), name=self._name, daemon=True).start()
        self._calls.put(call)
        return await answer

    async def idle(self) -> None:
        """Wait until all calls so far have ended."""
        if self._calls is not None:
            await self.call(_nothing)

    def stop(self) -> None:
        """End the thread after its calls."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _work(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


def _resolve(answer: asyncio.Future[T], found: T) -> None:
    if not answer.done():
        answer.set_result(found)


def _fail(answer: asyncio.Future[T], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)


def _nothing() -> None:
    """Come after everything in the thread."""
