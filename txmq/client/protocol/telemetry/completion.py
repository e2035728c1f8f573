"""The end of a call, whatever its face returns: a value, a future or a coroutine."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

# Gets the value, or None and the error.
Done: TypeAlias = Callable[[Any, BaseException | None], None]


def when_done(result: Any, done: Done) -> Any:  # noqa: ANN401  # of any face
    """Return a result that calls `done` once at its end, and is otherwise the same."""
    if isinstance(result, Coroutine):
        return _awaited(result, done)
    if hasattr(result, "add_done_callback"):
        result.add_done_callback(lambda future: _future_done(future, done))
        return result
    done(result, None)
    return result


def _future_done(future: Any, done: Done) -> None:  # noqa: ANN401  # of threads or asyncio
    if future.cancelled():
        done(None, CancelledError())
    elif (error := future.exception()) is not None:
        done(None, error)
    else:
        done(future.result(), None)


async def _awaited(work: Coroutine[Any, Any, Any], done: Done) -> Any:  # noqa: ANN401
    try:
        value = await work
    except BaseException as error:
        done(None, error)
        raise
    return when_done(value, done)  # which may be the future of a receipt
