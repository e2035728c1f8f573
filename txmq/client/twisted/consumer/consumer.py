"""Consumers on Twisted's reactor: async iterators, or handlers that may be
coroutines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, Unpack, overload

from twisted.internet.defer import Deferred, succeed

from txmq.client.protocol.consumer.checked_operations import operations_type
from txmq.client.protocol.consumer.consumer_calls import ConsumerCalls, SingleConsumer
from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.consumer.handlers import D, handler_options, require_handler
from txmq.client.protocol.consumer.operations import Delivered
from txmq.client.protocol.consumer.settings import ConsumerOptions, consumer_settings
from txmq.client.protocol.typed.bodies import Topics
from txmq.client.twisted.consumer.group_member import ReactorMember
from txmq.client.twisted.consumer.inbox import run_with_inbox
from txmq.client.twisted.consumer.members import ReactorMembers
from txmq.client.twisted.consumer.runner import Handler, run_on_reactor
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import AsyncCloseable
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from txmq.tx.postgres.driver import BlockingConnection

B = TypeVar("B", bound="BlockingConnection")


class TwistedConsumer(ConsumerCalls[ReactorMember], AsyncCloseable):
    """A consumer of one broker or of several, for the reactor's thread, and for use
    with `async with`.

    `async for message in consumer` gives messages until it is closed.
    """

    _members: ReactorMembers

    def __init__(self, members: ReactorMembers) -> None:
        self.settings, self._members = members.settings, members
        self._operations = operations_type(self.settings)

    async def __aiter__(self) -> AsyncIterator[DeliveredMessage]:
        while (message := await self.receive()) is not None:
            yield message

    async def batches(self) -> AsyncIterator[ReceivedBatch]:
        """Yield messages as they came together, until the consumer is closed.

        In an ordered group a partition's next batch comes when the one before it is
        settled.
        """
        while (batch := await self.receive_batch()) is not None:
            yield batch

    def receive(self, timeout: Duration | None = None) -> Deferred[DeliveredMessage | None]:
        """Fire with the next message; with None after `timeout` seconds without one,
        and once the consumer is closed.

        Fails with the error that ended the consumer. To cancel the Deferred leaves the
        message to the next caller.
        """
        return self._members.receive(self._operations.receive, seconds_of(timeout, "timeout"))

    def receive_many(
        self, most: int, timeout: Duration | None = None, *, batch_wait: Duration = 0.0
    ) -> Deferred[list[DeliveredMessage]]:
        """Wait as `receive` does for a first message, and fire with it and others that
        are there, at most so many.

        `batch_wait`: seconds to wait for more. In an ordered group several messages may
        be of one key, and are to be processed in their order.
        """
        return self._members.receive_many(
            most,
            seconds_of(timeout, "timeout"),
            batch_wait=seconds_of(batch_wait, "batch_wait"),
        )

    def receive_batch(self, timeout: Duration | None = None) -> Deferred[ReceivedBatch | None]:
        """Fire with the messages of one delivery, as columns; otherwise as
        `receive`.
        """
        return self._members.receive(self._operations.receive_batch, seconds_of(timeout, "timeout"))

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> Deferred[None]:
        """Ack a processed message. Fires at once; with `wait`, when the broker has the
        ack in its log.

        With `wait` it fails with NotLeased where the message was settled already or its
        lease had run out.
        """
        member = self._members.member_of(message)
        number = member.operations.ack(message, self._members.reactor.seconds())
        return self._acked(member, number, message, wait=wait)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> Deferred[None]:
        """Ack all messages of the batch that are not settled yet. `wait` as in
        `ack`.
        """
        member = self._members.member_of(batch)
        number = member.operations.ack_batch(batch, self._members.reactor.seconds())
        return self._acked(member, number, batch, wait=wait)

    def _acked(
        self, member: ReactorMember, number: int, delivered: Delivered, *, wait: bool
    ) -> Deferred[None]:
        member.acks_added(wait=wait)
        return member.when_confirmed(number, delivered) if wait else succeed(None)

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
            options = handler_options(workers, batch, batch_wait, idle_exit)
            require_handler(handler, inbox, coroutines=inbox is None)
            self._members.set_workers(workers * (batch or 1))
            if inbox is None:
                await run_on_reactor(self._members, handler, options)
            else:
                await run_with_inbox(self._members, handler, inbox, options)

        return Deferred.fromCoroutine(run())

    def close(self) -> Deferred[None]:
        """Leave the group: handlers may finish, what waits locally is returned, acks
        reach the broker. Fires when that is done, or takes too long.

        Handlers must not wait for it: it waits for them.
        """
        return Deferred.fromCoroutine(self._members.close())


class Consumer(TwistedConsumer, SingleConsumer[ReactorMember]):
    """A member of a consumer group, for the reactor's thread. Made by
    `client.consumer`; otherwise as the blocking one.

    `async for message in consumer` gives messages until it is closed.
    """


class Consumers(TwistedConsumer):
    """A member of one group at each of several brokers, for the reactor's thread. Made
    by `consumer` of a client of several brokers.

    Messages of all brokers come out of it, and are settled at their own. A broker that
    is away stops only its own partitions.
    """


C = TypeVar("C", Consumer, Consumers)


def join_group(
    kind: type[C],
    cores: Sequence[TwistedCore],
    group: str,
    topics: Topics,
    seconds: float,
    **options: Unpack[ConsumerOptions],
) -> tuple[C, Deferred[C]]:
    """Return a new consumer, and a Deferred that fires with it once it has joined its
    group at each broker that answers in so many seconds.

    Raises LocalProtocolError for invalid settings. The Deferred fails with
    BrokerUnavailable, or the refusal of a broker.
    """
    members = ReactorMembers(cores, consumer_settings(group, topics, **options))
    consumer = kind(members)

    async def join() -> C:
        await members.join(seconds)
        return consumer

    return consumer, Deferred.fromCoroutine(join())
