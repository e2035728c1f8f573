"""COMMIT and PREPARE on asyncio, which a cancelled task must not cut off.

A cancellation in the middle would leave open whether the server has done it. So the
statement runs on as a task of its own, and the cancelled task waits a moment for its
answer. The rules then go on with that answer, and the cancellation is kept for their
end (`Driver.interruption`). Without an answer the transaction is in doubt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeVar

from txmq.tx.postgres.errors import DriverError

T = TypeVar("T")
PATIENCE_S: Final = 5.0


class Ended(NamedTuple):
    """The result of a statement, and the cancellation that came meanwhile."""

    result: Any
    interruption: BaseException | None


async def uninterrupted(
    ending: Coroutine[Any, Any, object], give_up: Callable[[], Awaitable[object]]
) -> Ended:
    """Return the result of a statement that ends a transaction, even where this task is
    cancelled.

    If the answer does not come soon after that, `give_up` closes the connection, and
    DriverError is raised, without SQLSTATE.
    """
    task = asyncio.ensure_future(ending)
    try:
        return Ended(await asyncio.shield(task), None)
    except asyncio.CancelledError as cancelled:
        if task.cancelled():
            raise
        if not await _is_answered(task):
            task.add_done_callback(_looked_at)
            await give_up()
            raise DriverError(cancelled) from cancelled
        return Ended(task.result(), cancelled)


async def _is_answered(task: asyncio.Task[Any]) -> bool:
    """Wait a moment for the answer; a second cancellation does not wait."""
    try:
        await asyncio.wait({task}, timeout=PATIENCE_S)
    except asyncio.CancelledError:
        return task.done()
    return task.done()


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
