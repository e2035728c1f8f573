"""Consumers on asyncio: async iterators, or handlers that may be coroutines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

from txmq.client.aio.closing import AsyncCloseable
from txmq.client.aio.consumer.group_member import LoopMember
from txmq.client.aio.consumer.members import LoopMembers
from txmq.client.aio.consumer.runner import Handler, PlainWorker, run_workers
from txmq.client.aio.core import AioCore
from txmq.client.protocol.consumer.consumer_calls import ConsumerCalls, SingleConsumer
from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.consumer.handlers import (
    D,
    HandlerOptions,
    handler_options,
    require_handler,
)
from txmq.client.protocol.consumer.operations import Delivered
from txmq.client.protocol.consumer.settings import ConsumerOptions, consumer_settings
from txmq.client.protocol.typed.bodies import Topics
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage

A = TypeVar("A")  # an asyncio connection, whose packages have no base in common


class Done:
    """Result of a call whose work is done: to await it takes no time."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


DONE = Done()


class AioConsumer(ConsumerCalls[LoopMember], AsyncCloseable):
    """A consumer of one broker or of several, for its client's loop, and for use with
    `async with`.

    `async for message in consumer` gives messages until it is closed.
    """

    _members: LoopMembers

    def __init__(self, members: LoopMembers) -> None:
        self.settings, self._members = members.settings, members

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

    async def receive(self, timeout: Duration | None = None) -> DeliveredMessage | None:  # noqa: ASYNC109  # as of the other faces
        """Return the next message; None after `timeout` seconds without one, and once
        the consumer is closed.

        Raises the error that ended the consumer. To cancel the call leaves the message
        to the next caller.
        """
        return await self._members.receive(
            lambda operations, now: operations.receive(now), seconds_of(timeout, "timeout")
        )

    async def receive_many(
        self,
        most: int,
        timeout: Duration | None = None,  # noqa: ASYNC109  # as of the other faces
        *,
        batch_wait: Duration = 0.0,
    ) -> list[DeliveredMessage]:
        """Wait as `receive` does for a first message, and return it with others that
        are there, at most so many.

        `batch_wait`: seconds to wait for more. In an ordered group several messages may
        be of one key, and are to be processed in their order.
        """
        return await self._members.receive_many(
            most,
            seconds_of(timeout, "timeout"),
            batch_wait=seconds_of(batch_wait, "batch_wait"),
        )

    async def receive_batch(self, timeout: Duration | None = None) -> ReceivedBatch | None:  # noqa: ASYNC109  # as of the other faces
        """Return the messages of one delivery, as columns; otherwise as `receive`."""
        return await self._members.receive(
            lambda operations, now: operations.receive_batch(now), seconds_of(timeout, "timeout")
        )

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> Awaitable[None]:
        """Ack a processed message. The ack is on its way when the call returns; await
        it with `wait`, until the broker has the ack in its log.

        With `wait` it raises NotLeased where the message was settled already or its
        lease had run out.
        """
        member = self._members.member_of(message)
        number = member.operations.ack(message, self._members.loop.time())
        return self._acked(member, number, message, wait=wait)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> Awaitable[None]:
        """Ack all messages of the batch that are not settled yet. `wait` as in
        `ack`.
        """
        member = self._members.member_of(batch)
        number = member.operations.ack_batch(batch, self._members.loop.time())
        return self._acked(member, number, batch, wait=wait)

    def _acked(
        self, member: LoopMember, number: int, delivered: Delivered, *, wait: bool
    ) -> Awaitable[None]:
        member.acks_added(wait=wait)
        return member.when_confirmed(number, delivered) if wait else DONE

    @overload
    async def run(
        self,
        handler: Callable[[DeliveredMessage], object],
        *,
        inbox: None = None,
        workers: int = 1,
        batch: None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> None: ...

    @overload
    async def run(
        self,
        handler: Callable[[list[D]], object],
        *,
        inbox: None = None,
        workers: int = 1,
        batch: int,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> None: ...

    @overload
    async def run(
        self,
        handler: Callable[[DeliveredMessage, A], object],
        *,
        inbox: Callable[[], Awaitable[A]],
        workers: int = 1,
        batch: None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> None: ...

    @overload
    async def run(
        self,
        handler: Callable[[list[D], A], object],
        *,
        inbox: Callable[[], Awaitable[A]],
        workers: int = 1,
        batch: int,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> None: ...

    async def run(
        self,
        handler: Handler,
        *,
        inbox: Callable[[], Any] | None = None,
        workers: int = 1,
        batch: int | None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
    ) -> None:
        """Call the handler for each message, so many at a time, until the consumer is
        closed.

        `handler(message)` may return a coroutine. A message is acked when the handler
        is done. When it raises, the message is nacked, and retried by the group's
        policy. `batch`: the handler gets lists of up to so many messages instead, and
        `batch_wait` is the time in seconds for a list to fill. `idle_exit`: seconds
        without a message after which to end.

        `inbox`, a function that connects to PostgreSQL and may be a coroutine: then
        `handler(message, connection)` runs in a transaction that also records the
        message, and effect, record and position are committed together. The connection
        is of psycopg 3 (AsyncConnection) or asyncpg, one for each worker.

        To cancel the call cancels the handlers: their messages are delivered again. It
        returns when all of them have ended.
        """
        options = handler_options(workers, batch, batch_wait, idle_exit)
        require_handler(handler, inbox, coroutines=True)
        self._members.core.seconds()  # on this loop
        self._members.set_workers(workers * (batch or 1))
        if inbox is not None:
            await self._run_with_inbox(handler, inbox, options)
            return
        members, lists = self._members, batch is not None
        plain = [PlainWorker(members, handler, lists=lists) for _ in range(workers)]
        await run_workers(members, options, plain)

    async def _run_with_inbox(
        self, handler: Handler, connect: Callable[[], Any], options: HandlerOptions
    ) -> None:
        # For programs that have a database.
        from txmq.client.aio.consumer.inbox import (  # noqa: PLC0415
            Database,
            Inbox,
            InboxWorker,
            run_with_inbox,
        )

        members, lists = self._members, options.batch is not None

        async def apply(inboxes: Mapping[object, Inbox]) -> None:
            staff = [
                InboxWorker(members, inboxes, handler, Database(connect), lists=lists)
                for _ in range(options.workers)
            ]
            await run_workers(members, options, staff)

        await run_with_inbox(members, lambda: Database(connect), apply)

    async def close(self) -> None:
        """Leave the group: handlers may finish, what waits locally is returned, acks
        reach the broker. Returns when that is done, or takes too long.

        Called by a handler it returns at once: the group is left when handlers end.
        """
        await self._members.close()


class Consumer(AioConsumer, SingleConsumer[LoopMember]):
    """A member of a consumer group, for its client's loop. Made by `client.consumer`;
    otherwise as the blocking one.

    `async for message in consumer` gives messages until it is closed.
    """


class Consumers(AioConsumer):
    """A member of one group at each of several brokers, for its client's loop. Made by
    `consumer` of a client of several brokers.

    Messages of all brokers come out of it, and are settled at their own. A broker that
    is away stops only its own partitions. One that is found later is joined as well.
    """


C = TypeVar("C", Consumer, Consumers)


async def join_group(
    kind: type[C],
    cores: Sequence[AioCore],
    group: str,
    topics: Topics,
    seconds: float,
    **options: Unpack[ConsumerOptions],
) -> C:
    """Return a new consumer that has joined its group at each broker that answers in
    so many seconds.

    Raises LocalProtocolError for invalid settings, BrokerUnavailable, or the refusal of
    a broker.
    """
    settings, of_several = consumer_settings(group, topics, **options), kind is Consumers
    members = LoopMembers(cores, settings, of_several=of_several)
    await members.join(seconds)
    return kind(members)
