"""The event loop of a client, and waits on it that leave no doubt unnamed."""

from __future__ import annotations

import asyncio
import os
from asyncio import AbstractEventLoop, Future
from collections.abc import Coroutine, Iterable
from typing import Any, Literal, TypeVar

from txmq.errors import LocalProtocolError, TxmqError

T = TypeVar("T")
Outcome = Literal["not done", "unknown"]
NAMES = {
    "not done": "nothing was stored",
    "unknown": "the request may have been carried out",
}


class ClientLoop:
    """The event loop that a client belongs to from its first use on."""

    def __init__(self, kind: str = "client") -> None:
        self._kind = kind
        self._loop: AbstractEventLoop | None = None
        self._pid = os.getpid()

    def running(self) -> AbstractEventLoop:
        """Return the client's loop, which is the running one.

        Raises LocalProtocolError in a thread or process without it, and in another
        loop.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is self._loop and loop is not None:
            return loop
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"the {self._kind} belongs to process {self._pid}, and this one was forked from it",
                hint=f"make a {self._kind} in this process",
            )
        if loop is None:
            raise LocalProtocolError(
                f"the {self._kind} is used without a running event loop",
                hint="call it in a coroutine; from another thread use "
                "asyncio.run_coroutine_threadsafe(…, loop)",
            )
        if self._loop is not None:
            raise LocalProtocolError(
                f"the {self._kind} belongs to another event loop",
                hint=f"make a {self._kind} in each loop: a loop's sockets serve no other",
            )
        self._loop = loop
        return loop


def expire(
    loop: AbstractEventLoop, future: Future[T], seconds: float, error: BaseException | None
) -> Future[T]:
    """Return the future, which fails with `error` after so many seconds.

    None: it is cancelled.
    """
    if not future.done():
        timer = loop.call_later(max(seconds, 0.0), _expire, future, error)
        future.add_done_callback(lambda _future: timer.cancel())
    return future


def _expire(future: Future[Any], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.cancel()
    else:
        future.set_exception(error)


async def gather(works: Iterable[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    """Begin all works at once, and wait until each has ended.

    Where the wait is cancelled, the works are, and have ended when it raises.
    """
    ends: list[T | BaseException] = await asyncio.gather(*works, return_exceptions=True)
    found: list[T | Exception] = []
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, Exception):
            raise end
        found.append(end)
    return found


def cancelled(error: BaseException, outcome: Outcome, what: str) -> None:
    """Name the outcome of a request whose wait was cancelled, on its CancelledError."""
    if outcome_of(error) is None:
        error.outcome = outcome  # type: ignore[attr-defined]  # see outcome_of
        error.add_note(f"txmq: {what} was cancelled; {NAMES[outcome]}")


def outcome_of(error: BaseException | None) -> Outcome | None:
    """Return what became of the request that an error has ended.

    "not done": nothing is stored. "unknown": it may have been carried out. None: the
    error says nothing about a request. This works for the errors of txmq, and also for
    the CancelledError of a call, and the TimeoutError of `asyncio.timeout` and
    `asyncio.wait_for` around it.
    """
    seen = 0
    while error is not None and seen < 8:  # causes of causes
        outcome: Outcome | None = getattr(error, "outcome", None)
        if outcome is not None and (isinstance(error, TxmqError | asyncio.CancelledError)):
            return outcome
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None
