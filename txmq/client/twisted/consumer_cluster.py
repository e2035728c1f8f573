"""Consuming from several brokers with Twisted: one place where the messages of all of
them come out. See `several`.
"""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred, DeferredList, FirstError, gatherResults

from txmq.client.protocol.consumer.cluster import Several
from txmq.client.protocol.consumer.fetched import ReceivedBatch
from txmq.client.protocol.consumer.settings import Settings
from txmq.client.twisted.connection import timed
from txmq.client.twisted.consumer import Consumer
from txmq.client.twisted.consumer_base import CLOSE_S
from txmq.client.twisted.core import Core
from txmq.client.twisted.receiving import Takers, Taking
from txmq.errors import BrokerUnavailable, TxmqError
from txmq.model.message import ReceivedMessage


class Consumers(Several[Consumer], Taking):
    """Members of one group at several brokers, for the reactor's thread; as a Consumer
    of one otherwise.

    Made by `consumer` of a client of several brokers. `parts` are its members, in the
    order of the brokers.
    """

    parts: tuple[Consumer, ...]

    def __init__(self, cores: Sequence[Core], settings: Settings) -> None:
        super().__init__()
        self.settings, self._reactor = settings, cores[0].reactor
        self._takers = Takers(self._reactor, lambda: self.closed)
        self.parts = tuple(Consumer(core, settings, self._takers) for core in cores)

    async def joined(self, patience: float) -> Consumers:
        """Itself, once it is a member wherever a broker answers in time. Called once,
        by the client.
        """
        each = DeferredList(
            [part.when_serving() for part in self.parts], fireOnOneErrback=True, consumeErrors=True
        )
        try:
            await timed(
                self._reactor, each, patience, BrokerUnavailable("one of the brokers is away")
            )
        except (FirstError, TxmqError):  # which says less than the members know
            error = self._not_joined(patience)
            if error is not None:
                await gatherResults([Deferred.fromCoroutine(part.abandon()) for part in self.parts])
                raise error from None
        return self

    def _awaited(self) -> None:
        for part in self._in_turn():
            part.look()

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> Deferred[None]:
        """The message is processed; as the one of Consumer."""
        return self.part_of(message).ack(message, wait=wait)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> Deferred[None]:
        """All messages of the batch are processed, but for those that were acked or
        nacked alone.
        """
        return self.part_of(batch).ack_batch(batch, wait=wait)

    def inbox_of(self, message: ReceivedMessage) -> str:
        """The group that the inbox counts the message in: offsets of several brokers
        are told apart.
        """
        return self.part_of(message).inbox_name

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Adds to the stats what only handlers know."""
        self.parts[0].count(duplicates=duplicates, retried=retried)

    def close(self) -> Deferred[None]:
        """Leaves the group everywhere, as the one of Consumer does."""
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        for part in self.parts:
            part.take_no_more()
        await self._handlers_done(CLOSE_S)
        await gatherResults([part.close() for part in self.parts])
