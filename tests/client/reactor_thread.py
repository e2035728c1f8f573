"""A reactor in a thread, and coroutines that a test runs in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.selectreactor import SelectReactor
from twisted.internet.threads import blockingCallFromThread

from txmq.testing.wait import PATIENCE_S

Work = Callable[[], Coroutine[Deferred[Any], Any, Any]]
InReactor = Callable[[Work], Any]


@contextmanager
def running_reactor(kind: Callable[[], Any] = SelectReactor) -> Iterator[Any]:
    """Run a new reactor in a thread during the block."""
    reactor = kind()
    thread = threading.Thread(target=reactor.run, kwargs={"installSignalHandlers": False})
    thread.start()
    try:
        yield reactor
    finally:
        reactor.callFromThread(reactor.stop)
        thread.join()


def make_in_reactor(reactor: Any) -> InReactor:
    """Return a function that runs a coroutine in the reactor and waits for its end."""
    return lambda work: blockingCallFromThread(
        reactor, lambda: Deferred.fromCoroutine(work()).addTimeout(PATIENCE_S, reactor)
    )
