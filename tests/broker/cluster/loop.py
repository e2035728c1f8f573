"""The reactor of a test, in the thread of the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from txmq.testing.wait import PATIENCE_S


class Loop:
    """The reactor of a test: calls of threads are made while it runs."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = SimpleQueue()

    def callFromThread(self, callable: Callable[..., object], *args: object) -> None:  # noqa: A002, N802
        self._calls.put((callable, args))

    def run_until(self, done: Callable[[], object], what: str) -> None:
        """Make the calls that come, until `done` or for PATIENCE_S."""
        ends_at = time.monotonic() + PATIENCE_S
        while not done():
            try:
                function, args = self._calls.get(timeout=max(0.0, ends_at - time.monotonic()))
            except Empty:
                raise TimeoutError(f"not within {PATIENCE_S} s: {what}") from None
            function(*args)

    def wait(self) -> None:
        """Wait for a call, and do not make it yet."""
        self._calls.put(self._calls.get(timeout=PATIENCE_S))

    def run_waiting(self) -> None:
        """Make the calls that have come."""
        while not self._calls.empty():
            function, args = self._calls.get()
            function(*args)
