"""Threads for blocking work, whose results come back to the reactor."""

from __future__ import annotations

from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from twisted.internet.threads import deferToThreadPool
from twisted.python.threadpool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.defer import Deferred


class _Pool(ThreadPool):
    """A thread pool whose threads do not keep the process from ending."""

    threadFactory = staticmethod(partial(Thread, daemon=True))  # type: ignore[assignment]  # whatever makes threads


class WorkerThreads:
    """A thread pool for one kind of blocking work."""

    def __init__(self, reactor: Any, name: str, size: int = 1) -> None:  # noqa: ANN401
        self._reactor = reactor
        self._pool = _Pool(minthreads=0, maxthreads=size, name=name)
        self._pool.start()

    def __call__(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        return deferToThreadPool(self._reactor, self._pool, function, *args)

    def stop(self, within_s: float) -> bool:
        """Take no more work, and wait so long for what is under way. Return whether
        that has ended.

        A thread that hangs in a system call cannot be interrupted, and ends with the
        process.
        """
        waiting = Thread(target=self._pool.stop, name=f"{self._pool.name}-end", daemon=True)
        waiting.start()
        waiting.join(within_s)
        return not waiting.is_alive()
