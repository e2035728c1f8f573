"""Stories told on a reactor: coroutines that a test runs in the reactor's thread and
waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.selectreactor import SelectReactor
from twisted.internet.threads import blockingCallFromThread

WAIT_S = 20.0
Story = Callable[[], Coroutine[Deferred[Any], Any, Any]]
Tell = Callable[[Story], Any]


@contextmanager
def running_reactor() -> Iterator[Any]:
    """A reactor of its own, in a thread."""
    reactor: Any = SelectReactor()
    thread = threading.Thread(target=reactor.run, kwargs={"installSignalHandlers": False})
    thread.start()
    try:
        yield reactor
    finally:
        reactor.callFromThread(reactor.stop)
        thread.join(WAIT_S)


def teller(reactor: Any) -> Tell:
    """Runs a story in the reactor's thread and waits for its end."""
    return lambda story: blockingCallFromThread(
        reactor, lambda: Deferred.fromCoroutine(story()).addTimeout(3 * WAIT_S, reactor)
    )
