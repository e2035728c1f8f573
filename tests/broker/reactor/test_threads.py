"""The broker's threads: one that hangs does not keep the process from ending."""

from __future__ import annotations

from threading import Event
from typing import Any

from txmq.broker.reactor.threads import WorkerThreads
from txmq.testing.wait import PATIENCE_S


class Reactor:
    """The receiver of the threads' results."""

    def __init__(self) -> None:
        self.results: list[object] = []

    def callFromThread(self, function: Any, *args: object) -> None:  # noqa: N802  # Twisted's
        self.results.append((function, args))


def test_a_pool_ends_with_the_work_under_way() -> None:
    reactor, began = Reactor(), Event()
    threads = WorkerThreads(reactor, "t")
    threads(began.set)
    assert threads.stop(PATIENCE_S)
    assert began.is_set()
    assert len(reactor.results) == 1


def test_a_call_that_hangs_is_waited_for_only_so_long() -> None:
    hangs, goes_on = Event(), Event()
    threads = WorkerThreads(Reactor(), "t")

    def hang() -> None:
        hangs.set()
        goes_on.wait()

    threads(hang)
    assert hangs.wait(PATIENCE_S)
    assert not threads.stop(0.01)
    goes_on.set()
