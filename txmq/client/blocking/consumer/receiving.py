"""How messages are taken, by any number of threads: from one broker's member, or from
those of several.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, RLock
from typing import TypeVar

from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.consumer.operations import Hands

T = TypeVar("T")


class Changed(Condition):
    """What guards members and tells of changes. `with changed.lock` does what `with
    changed` does, in half the time: for what is done once a message. `waiting`: how
    many threads wait, so that others need tell nobody.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        super().__init__(self.lock)
        self.waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        """As any Condition."""
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1


class Taking(ABC):
    """What messages come out of."""

    _changed: Changed
    _handlers: int  # threads that are working

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it hands out nothing more."""

    @abstractmethod
    def taken(self, take: Callable[[Hands, float], T], now: float) -> T | None:
        """What `take` finds, if anything. `_changed` is held."""

    def __iter__(self) -> Iterator[DeliveredMessage]:
        """Messages, until it is closed."""
        while (message := self.receive()) is not None:
            yield message

    def batches(self) -> Iterator[ReceivedBatch]:
        """Messages as they came together, until it is closed; in an ordered group one
        batch a partition.

        The fast path for volumes: the columns of a batch (`bodies`, `keys`, `offsets`
        ...) are decoded at once.
        """
        while (batch := self.receive_batch()) is not None:
            yield batch

    def receive(self, timeout: float | None = None) -> DeliveredMessage | None:
        """The next message; None after `timeout` seconds without one, and once it is
        closed.

        Raises why the consumer cannot go on.
        """
        return self._take(Hands.take_one, timeout)

    def receive_many(
        self, most: int, timeout: float | None = None, *, batch_wait: float = 0.0
    ) -> list[DeliveredMessage]:
        """Waits as `receive` does for the first, and takes more, at most so many, if
        they are there.

        `batch_wait`: seconds to wait for those that are not there yet. In an ordered
        group they may be of one key, and are to be processed in their order.
        """

        def take(hands: Hands, now: float) -> list[DeliveredMessage]:
            return hands.take(most - len(found), now)

        found: list[DeliveredMessage] = []
        found += self._take(take, timeout) or []
        if found and batch_wait:
            deadline = time.monotonic() + batch_wait
            while len(found) < most and (more := self._take(take, deadline - time.monotonic())):
                found += more
        return found

    @contextmanager
    def working(self) -> Iterator[None]:
        """A thread takes messages and works on them for the length of the block;
        `close` waits for its end.
        """
        with self._changed:
            self._handlers += 1
        try:
            yield
        finally:
            with self._changed:
                self._handlers -= 1
                self._changed.notify_all()

    def receive_batch(self, timeout: float | None = None) -> ReceivedBatch | None:
        """The next batch; otherwise as `receive`."""
        return self._take(Hands.take_batch, timeout)

    def _take(self, take: Callable[[Hands, float], T], timeout: float | None) -> T | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed.lock:
            while not self.closed:
                if found := self.taken(take, time.monotonic()):
                    return found
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not self._changed.wait(left):
                    return None
        return None
