"""Consumers on Twisted's reactor: async iterators, or handlers that may be
coroutines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from twisted.internet.defer import Deferred, succeed

from txmq.client.aio.closing import AsyncCloseable
from txmq.client.aio.consumer import consumer
from txmq.client.aio.consumer.consumer import AioConsumer
from txmq.client.aio.consumer.runner import Handler
from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.consumer.handlers import D, HandlerOptions, require_handler
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.client.twisted.bridge import Bridge
from txmq.client.twisted.deferring import at_once, deferring, iterating
from txmq.model.durations import Duration
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName

if TYPE_CHECKING:  # for programs that have a database
    from txmq.tx.postgres.driver import BlockingConnection

B = TypeVar("B", bound="BlockingConnection")


class TwistedConsumer(AsyncCloseable):
    """A consumer of one broker or of several, for the reactor's thread, and for use
    with `async with`.

    `async for message in consumer` gives messages until it is closed.
    """

    _awaited: AioConsumer

    def __init__(self, bridge: Bridge, awaited: AioConsumer) -> None:
        self._bridge, self._awaited = bridge, awaited
        awaited._run_with_inbox = partial(_run_in_threads, awaited)  # type: ignore[method-assign]  # noqa: SLF001

    async def __aiter__(self) -> AsyncIterator[DeliveredMessage]:
        while (message := await self.receive()) is not None:
            yield message

    @property
    def settings(self) -> ConsumerSettings:
        """The settings that it was made with."""
        return self._awaited.settings

    @property
    def closed(self) -> bool:
        """True once the consumer delivers nothing more."""
        return self._awaited.closed

    @property
    def stats(self) -> ConsumerStats:
        """Counters since the consumer was made."""
        return self._bridge.at_once(lambda: self._awaited.stats)

    @property
    def paused(self) -> frozenset[str]:
        """The paused topics; after `pause()` all that the consumer reads."""
        return self._bridge.at_once(lambda: self._awaited.paused)

    def stop_on_signals(self) -> None:
        """Close the consumer before the reactor stops, which it does at SIGTERM and
        SIGINT (Ctrl-C): handlers finish, and `run` and iterators end.
        """
        self._bridge.before_shutdown(self.close)

    receive = deferring(AioConsumer.receive)
    receive_many = deferring(AioConsumer.receive_many)
    receive_batch = deferring(AioConsumer.receive_batch)
    batches = iterating(AioConsumer.batches)

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> Deferred[None]:
        """Ack a processed message. Fires at once; with `wait`, when the broker has the
        ack in its log.

        With `wait` it fails with NotLeased where the message was settled already or its
        lease had run out.
        """
        acked = self._bridge.at_once(lambda: self._awaited.ack(message, wait=wait))
        return self._bridge.defer(lambda: acked) if wait else succeed(None)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> Deferred[None]:
        """Ack all messages of the batch that are not settled yet. `wait` as in
        `ack`.
        """
        acked = self._bridge.at_once(lambda: self._awaited.ack_batch(batch, wait=wait))
        return self._bridge.defer(lambda: acked) if wait else succeed(None)

    ack_many = at_once(AioConsumer.ack_many)
    nack = at_once(AioConsumer.nack)
    nack_batch = at_once(AioConsumer.nack_batch)
    nack_many = at_once(AioConsumer.nack_many)
    dead_letter = at_once(AioConsumer.dead_letter)
    postpone = at_once(AioConsumer.postpone)
    extend = at_once(AioConsumer.extend)
    give_back = at_once(AioConsumer.give_back)
    pause = at_once(AioConsumer.pause)
    resume = at_once(AioConsumer.resume)

    @overload
    def run(
        self,
        handler: Callable[[DeliveredMessage], object],
        *,
        inbox: None = None,
        workers: int = 1,
        batch: None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> Deferred[None]: ...

    @overload
    def run(
        self,
        handler: Callable[[list[D]], object],
        *,
        inbox: None = None,
        workers: int = 1,
        batch: int,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> Deferred[None]: ...

    @overload
    def run(
        self,
        handler: Callable[[DeliveredMessage, B], None],
        *,
        inbox: Callable[[], B],
        workers: int = 1,
        batch: None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> Deferred[None]: ...

    @overload
    def run(
        self,
        handler: Callable[[list[D], B], None],
        *,
        inbox: Callable[[], B],
        workers: int = 1,
        batch: int,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> Deferred[None]: ...

    def run(
        self,
        handler: Handler,
        *,
        inbox: Callable[[], BlockingConnection] | None = None,
        workers: int = 1,
        batch: int | None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> Deferred[None]:
        """Call the handler for each message, so many at a time, until the consumer is
        closed.

        `handler(message)` may return a Deferred, a coroutine or an asyncio future. A
        message is acked when the handler is done. When it raises, the message is
        nacked, and retried by the group's policy. `batch`: the handler gets lists of up
        to so many messages instead, and `batch_wait` is the time in seconds for a list
        to fill. `idle_exit`: seconds without a message after which to end.

        `inbox`, a function that connects to PostgreSQL: then `handler(message,
        connection)` runs in a transaction that also records the message, as with the
        blocking `Consumer.run`. It runs in a thread, one for each worker, and must not
        be a coroutine. There it calls the consumer through
        `blockingCallFromThread(reactor, consumer.nack, message)`.

        To cancel the Deferred ends the run: handlers in threads finish, others are
        cancelled and their messages delivered again. It fails with CancelledError when
        all of them have ended.
        """

        async def run() -> None:
            require_handler(handler, inbox, coroutines=inbox is None)
            in_reactor = partial(self._bridge.in_reactor, handler)
            call: Any = self._awaited.run  # which of its overloads, the arguments decide
            await call(
                in_reactor if inbox is None else handler,
                inbox=inbox,
                workers=workers,
                batch=batch,
                batch_wait=batch_wait,
                idle_exit=idle_exit,
            )

        return self._bridge.defer(run)

    close = deferring(AioConsumer.close)


class Consumer(TwistedConsumer):
    """A member of a consumer group, for the reactor's thread. Made by
    `client.consumer`; otherwise as the blocking one.

    `async for message in consumer` gives messages until it is closed.
    """

    _awaited: consumer.Consumer

    @property
    def group(self) -> str:
        """The name of the group at the broker: for a broadcast member its own,
        `group@member`.
        """
        return self._awaited.group

    @property
    def member(self) -> str:
        """The name of the member, given or made by the broker."""
        return self._awaited.member

    @property
    def epoch(self) -> int:
        """The number of resets of the group that reprocess messages. The inbox records
        messages by it.
        """
        return self._awaited.epoch

    @property
    def assignment(self) -> frozenset[PartitionName]:
        """The partitions assigned to this member, as (topic, number), as the broker
        last reported them.
        """
        return self._awaited.assignment


class Consumers(TwistedConsumer):
    """A member of one group at each of several brokers, for the reactor's thread. Made
    by `consumer` of a client of several brokers.

    Messages of all brokers come out of it, and are settled at their own. A broker that
    is away stops only its own partitions.
    """


async def _run_in_threads(
    awaited: AioConsumer,
    handler: Handler,
    connect: Callable[[], BlockingConnection],
    options: HandlerOptions,
) -> None:
    # For programs that have a database.
    from txmq.client.twisted.inbox import run_in_threads  # noqa: PLC0415

    await run_in_threads(awaited._members, handler, connect, options)  # noqa: SLF001  # of asyncio's
