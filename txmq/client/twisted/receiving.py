"""How messages are taken on the reactor's thread: from one broker's member, or from
those of several.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred

from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.consumer.operations import Hands
from txmq.client.twisted.connection import nothing
from txmq.client.twisted.protocols import Closing, Reactor
from txmq.client.twisted.runner import Handler, Limits, run_handler
from txmq.errors import TxmqError
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from txmq.client.protocol.consumer.settings import Settings
    from txmq.client.twisted.consumer_base import ConsumerBase

T = TypeVar("T")
Take = Callable[[Hands, float], T]


def _up_to(most: int) -> Take[list[DeliveredMessage]]:
    return lambda hands, now: hands.take(most, now)


class Takers:
    """Those who wait for messages, in the order in which they came. `over`: whether no
    more will come.
    """

    def __init__(self, reactor: Reactor, over: Callable[[], bool]) -> None:
        self._reactor, self._over = reactor, over
        self._waiting: deque[tuple[Take[Any], Deferred[Any]]] = deque()

    def wait(self, take: Take[T], timeout: float | None) -> Deferred[T | None]:
        """What `take` finds as soon as it finds something; None after so many seconds,
        or once all is over.
        """
        taker: Deferred[T | None] = Deferred()
        self._waiting.append((take, taker))
        if timeout is not None:
            taker.addTimeout(max(0.0, timeout), self._reactor, nothing)
        return taker

    def serve(self, find: Callable[[Take[Any]], Any]) -> None:
        """Gives those who wait what `find` finds for them; what it raises goes to the
        first of them.
        """
        while self._waiting:
            take, taker = self._waiting[0]
            if taker.called:  # cancelled
                self._waiting.popleft()
                continue
            try:
                found = find(take)
            except TxmqError as error:
                self._waiting.popleft()
                taker.errback(error)
                continue
            if not found and not self._over():
                return
            self._waiting.popleft()
            taker.callback(found or None)


class Taking(Closing):
    """What messages come out of. `parts` are the members that it is, one at each
    broker.
    """

    settings: Settings
    parts: Sequence[ConsumerBase]
    _reactor: Reactor
    _takers: Takers
    _handlers = 0  # that have messages

    def __init__(self) -> None:
        self._done: list[Deferred[None]] = []  # those who wait for the last handler

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it hands out nothing more."""

    @property
    def reactor(self) -> Reactor:
        """Where it runs."""
        return self._reactor

    @abstractmethod
    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        """All of these messages are processed."""

    @abstractmethod
    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """All of these messages failed, but for those that are not in hand any more."""

    @abstractmethod
    def give_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Hands messages back as if they had never been taken."""

    @abstractmethod
    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Adds to the stats what only handlers know."""

    @abstractmethod
    def epoch_of(self, message: ReceivedMessage) -> int:
        """The group's epoch when the message came."""

    @abstractmethod
    def inbox_of(self, message: ReceivedMessage) -> str:
        """The group that the inbox counts the message in."""

    @abstractmethod
    def _awaited(self) -> None:
        """Somebody waits for messages."""

    def receive(self, timeout: float | None = None) -> Deferred[DeliveredMessage | None]:
        """The next message; None after `timeout` seconds without one, and once it is
        closed.

        Fails with why the consumer cannot go on. To cancel it is to leave the message
        to the next one who asks.
        """
        taken = self._take(_up_to(1), timeout)
        return taken.addCallback(lambda found: found[0] if found else None)

    def receive_many(
        self, most: int, timeout: float | None = None, *, batch_wait: float = 0.0
    ) -> Deferred[list[DeliveredMessage]]:
        """Waits as `receive` does for the first, and takes more, at most so many, if
        they are there.

        `batch_wait`: seconds to wait for those that are not there yet. In an ordered
        group they may be of one key, and are to be processed in their order.
        """
        first = self._take(_up_to(most), timeout)
        if not batch_wait:
            return first.addCallback(lambda found: found or [])
        return first.addCallback(
            lambda found: Deferred.fromCoroutine(self.filled(found or [], most, batch_wait))
        )

    async def filled(
        self, found: list[DeliveredMessage], most: int, seconds: float
    ) -> list[DeliveredMessage]:
        """These messages, if any, and more that come in so many seconds."""
        ends = self._reactor.seconds() + seconds
        while seconds and 0 < len(found) < most:
            more = await self._take(_up_to(most - len(found)), ends - self._reactor.seconds())
            if not more:
                break
            found += more
        return found

    def receive_batch(self, timeout: float | None = None) -> Deferred[ReceivedBatch | None]:
        """The messages of one delivery, as columns; otherwise as `receive`."""
        return self._take(Hands.take_batch, timeout)

    def _take(self, take: Take[T], timeout: float | None) -> Deferred[T | None]:
        taker = self._takers.wait(take, timeout)
        self._awaited()
        return taker

    async def __aiter__(self) -> AsyncIterator[DeliveredMessage]:
        while (message := await self.receive()) is not None:
            yield message

    async def batches(self) -> AsyncIterator[ReceivedBatch]:
        """Messages as they came together, until the consumer is closed; in an ordered
        group one batch a partition.
        """
        while (batch := await self.receive_batch()) is not None:
            yield batch

    def run(
        self,
        handler: Handler,
        *,
        inbox: Callable[[], Connection] | None = None,
        workers: int = 1,
        batch: int | None = None,
        batch_wait: float = 0.0,
        idle_exit: float | None = None,
    ) -> Deferred[None]:
        """Calls the handler for each message, so many at a time, until the consumer is
        closed.

        `handler(message)` may give a Deferred or a coroutine: what it returns from is
        acked, what raises is nacked, and retried by the group's policy. `batch`: the
        handler gets lists of up to so many messages instead, and `batch_wait` seconds
        are waited for a list to fill. `idle_exit`: seconds without a message after
        which to end.

        `inbox`, a function that connects to PostgreSQL: then `handler(message,
        connection)` runs in a transaction that also remembers the message, as with the
        blocking `Consumer.run`. It runs in a thread, one for each worker, and is no
        coroutine; of this consumer it has to ask by `blockingCallFromThread(reactor,
        consumer.nack, message)`.
        """
        limits = Limits(workers, batch, batch_wait, idle_exit)
        return Deferred.fromCoroutine(run_handler(self, handler, inbox, limits))

    @property
    def at_work(self) -> int:
        """How many handlers have messages."""
        return self._handlers

    @contextmanager
    def working(self) -> Iterator[None]:
        """A handler has messages for the length of the block; `close` waits for its
        end.
        """
        self._handlers += 1
        try:
            yield
        finally:
            self._handlers -= 1
            if not self._handlers:
                done, self._done = self._done, []
                for waiting in done:
                    if not waiting.called:  # for too long
                        waiting.callback(None)

    async def _handlers_done(self, seconds: float) -> None:
        """Returns when no handler is at work, or that takes too long."""
        if self._handlers:
            waiting: Deferred[None] = Deferred()
            self._done.append(waiting)
            await waiting.addTimeout(seconds, self._reactor, nothing)
