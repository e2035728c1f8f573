"""Consuming from several brokers, blocking: one place where the messages of all of them
come out. See `several`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from txmq.client.blocking.concurrently import together
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.client.blocking.consumer.receiving import Changed, Taking
from txmq.client.blocking.consumer.runner import Runs
from txmq.client.blocking.core import Core
from txmq.client.protocol.consumer.cluster import Several
from txmq.client.protocol.consumer.fetched import ReceivedBatch
from txmq.client.protocol.consumer.operations import Hands
from txmq.client.protocol.consumer.settings import Settings
from txmq.model.message import ReceivedMessage

CLOSE_S = 10.0
T = TypeVar("T")


class Consumers(Several[Consumer], Taking, Runs):
    """Members of one group at several brokers. For any number of threads, and for use
    with `with`.

    Made by `consumer` of a client of several brokers; as a Consumer of one otherwise.
    `parts` are its members, in the order of the brokers.
    """

    def __init__(self, cores: Sequence[Core], settings: Settings) -> None:
        self.settings = settings
        self._changed = Changed()
        self.parts = tuple(Consumer(core, settings, self._changed) for core in cores)
        self._handlers = 0

    def join(self, timeout: float) -> None:
        """Becomes a member wherever a broker answers in time. Called once, by the
        client.

        Raises BrokerUnavailable where none does, and why one refuses.
        """
        for part in self.parts:
            part.start()
        with self._changed:
            self._changed.wait_for(self._have_joined, timeout)
            error = self._not_joined(timeout)
        if error is not None:
            together([part.abandon for part in self.parts])
            raise error

    def taken(self, take: Callable[[Hands, float], T], now: float) -> T | None:
        """What `take` finds at the first of its members that has something."""
        found = (part.taken(take, now) for part in self._in_turn())
        return next(filter(None, found), None)

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> None:
        """The message is processed."""
        self.part_of(message).ack(message, wait=wait)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> None:
        """All messages of the batch are processed, but for those that were acked or
        nacked alone.
        """
        self.part_of(batch).ack_batch(batch, wait=wait)

    def inbox_of(self, message: ReceivedMessage) -> str:
        """The group that the inbox counts the message in: offsets of several brokers
        are told apart.
        """
        return self.part_of(message).inbox_name

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Adds to the stats what only handlers know."""
        self.parts[0].count(duplicates=duplicates, retried=retried)

    def close(self, timeout: float = CLOSE_S) -> None:
        """Leaves the group everywhere, as `Consumer.close` does."""
        deadline = time.monotonic() + timeout
        for part in self.parts:
            part.take_no_more()
        with self._changed:
            self._changed.wait_for(lambda: not self._handlers, timeout)
        together(
            [partial(part.close, max(0.0, deadline - time.monotonic())) for part in self.parts]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
