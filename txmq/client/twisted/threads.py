"""The threads of a client on Twisted, for databases and position stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredSemaphore, succeed
from twisted.internet.threads import deferToThreadPool
from twisted.python.threadpool import ThreadPool

from txmq.client.twisted.protocols import Reactor

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """At most `size` threads, started at their first use.

    There are as many `places` for open transactions.
    """

    def __init__(self, reactor: Reactor, size: int) -> None:
        self._reactor = reactor
        self._pool = ThreadPool(0, size, "txmq-transactions")
        self._at_shutdown: object = None
        self.places = DeferredSemaphore(size)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Call a function in a thread. The Deferred has its result or fails."""
        if not self._pool.started:
            self._pool.start()
            self._at_shutdown = self._reactor.addSystemEventTrigger(
                "during", "shutdown", self._pool.stop
            )
        work: Deferred[T] = deferToThreadPool(self._reactor, self._pool, function, *args, **kwargs)
        return work

    def stop(self) -> Deferred[None]:
        """Stop the threads. The Deferred fires when the last one has ended."""
        if not self._pool.started:
            return succeed(None)
        self._reactor.removeSystemEventTrigger(self._at_shutdown)
        ended: Deferred[None] = deferToThreadPool(
            self._reactor, self._reactor.getThreadPool(), self._pool.stop
        )
        return ended
