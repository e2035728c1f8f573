"""Sends of the asyncio client: messages of one turn of the loop go out together.

The protocol is that of the blocking client's sender: `Accumulator` and
`InFlightRequests`, which do no I/O. Its futures are the loop's own, so that a frame of
receipts wakes its callers without a callback for each.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import AbstractEventLoop, Future
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from threading import get_ident
from typing import Any, TypeVar, cast

from txmq.client.aio.connection import AioConnection
from txmq.client.aio.loop import expire
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import silent_for
from txmq.client.protocol.sender.accumulator import Accumulator, SideRequest
from txmq.client.protocol.sender.in_flight import InFlightRequests
from txmq.client.protocol.sender.multi_send import SenderStats
from txmq.client.protocol.sender.promise import Promise
from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.settings import ClientSettings
from txmq.errors import ClientClosed, Throttled, TxmqError, UnknownTopic
from txmq.model.measures import counted
from txmq.model.message import Message, Receipt
from txmq.wire.frames import Frame

CHECK_EVERY_S = 0.25  # for time-outs
T = TypeVar("T")
log = get_logger()


class LoopFutures:
    """Futures of an event loop. A caller may have cancelled his."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        # What accumulators pass on; nothing there needs more of it than of a promise.
        self.create = cast("Callable[[], Promise[Any]]", loop.create_future)

    def resolve(
        self, futures: Sequence[Promise[Any]], results: Sequence[Any], *, unobserved_only: bool
    ) -> bool:
        del unobserved_only
        for future, result in zip(futures, results, strict=True):
            if not future.done():
                future.set_result(result)
        return True

    def fail(self, futures: Sequence[Promise[Any]], error: BaseException) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(error)


class AioSender:
    """The sender of an asyncio client, for its loop.

    `refresh` asks the broker about a topic.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        topics: TopicCache,
        settings: ClientSettings,
        refresh: Callable[[str], Awaitable[object]],
        failover_after: float | None = None,
    ) -> None:
        """`failover_after` is for a client of several brokers.

        A message that could go to another broker fails after so many seconds without a
        first connection, and at once when the connection is lost.
        """
        self._failover_after = failover_after
        self._loop, self._topics = loop, topics
        self._settings, self._refresh = settings, refresh
        self._accumulator = Accumulator(
            topics,
            messages=settings.window,
            size=settings.window_bytes,
            wake=_no_wake,
            futures=LoopFutures(loop),
        )
        # This thread drains the accumulator: it must not wait for room there.
        self._accumulator.draining_thread = get_ident()
        self._in_flight = InFlightRequests(topics, self._accumulator)
        self._connection: AioConnection | None = None
        self._write_scheduled = False
        self._refreshing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._resumption: asyncio.TimerHandle | None = None  # after a pause
        self._room: deque[Future[None]] = deque()  # callers that wait for room
        self._idle: list[Future[None]] = []  # and for the last answer

    @property
    def idle(self) -> bool:
        """True where every request has its answer."""
        return self._accumulator.empty

    @property
    def connected(self) -> bool:
        """True while there is a connection."""
        return self._connection is not None

    @property
    def full(self) -> bool:
        """True where a message would have to wait for room."""
        return self._accumulator.full or bool(self._room)

    @property
    def stats(self) -> SenderStats:
        """The counters of sends."""
        return self._in_flight.stats

    async def wait_for_room(self, seconds: float) -> None:
        """Wait until one more message may be sent, in turn. Raises Throttled."""
        late = Throttled(
            f"{counted(self._accumulator.unanswered, 'message')} without a receipt",
            hint="wait for receipts before sending on, or raise `window`",
        )
        if not self.full:
            return
        deadline = self._loop.time() + seconds
        waiter: Future[None] = self._loop.create_future()
        self._room.append(waiter)
        try:
            while True:
                await expire(self._loop, waiter, deadline - self._loop.time(), late)
                if not self._accumulator.full:
                    self._room.popleft()
                    return  # and the caller appends before anybody else
                waiter = self._room[0] = self._loop.create_future()
        except BaseException:
            self._room.remove(waiter)
            self._wake_for_room()
            raise

    def send(self, topic: str, message: Message, partition: int | None) -> Future[Receipt]:
        """Send a message whose topic is cached, and return the future of its receipt.

        Raises the errors of a send.
        """
        future = self._accumulator.append(topic, message, partition, 0.0)
        self._appended()
        return cast("Future[Receipt]", future)

    def send_request(self, request: SideRequest[T]) -> Future[T]:
        """Send a request of another kind, again after a lost connection, and return the
        future of its reply. A repetition must do no harm.
        """
        future = self._accumulator.append_request(request)
        self._appended()
        return cast("Future[T]", future)

    def withdraw(self, future: Future[Receipt]) -> bool:
        """Take a message back; return False where it may be stored."""
        if not self._in_flight.withdraw(future):
            return False
        self._progressed()
        return True

    async def flush(self, seconds: float) -> bool:
        """Wait until every request has its answer. Return False after so many
        seconds.
        """
        if not self._accumulator.empty:
            waiter: Future[None] = self._loop.create_future()
            self._idle.append(waiter)
            try:
                async with asyncio.timeout(seconds):
                    await waiter
            except TimeoutError:
                pass
            finally:
                if waiter in self._idle:
                    self._idle.remove(waiter)
        return self._accumulator.empty

    def attach(self, connection: AioConnection) -> None:
        """Use a new connection."""
        self._connection = connection
        connection.on_drained = self._schedule_write
        connection.lost.add_done_callback(lambda _lost: self._connection_lost(connection))
        self._schedule_write()

    def _connection_lost(self, connection: AioConnection) -> None:
        if self._connection is connection:
            self._connection = None
            self._in_flight.connection_lost()
            if self._failover_after is not None:
                self._in_flight.fail_unsent(time.monotonic())
            self._progressed()

    def receive(self, frames: Sequence[Frame]) -> None:
        """Handle the replies to this sender's requests."""
        self._in_flight.receive(frames)
        self._progressed()
        if not self._accumulator.empty:
            self._schedule_write()

    def _appended(self) -> None:
        self._wake_for_room()
        self._schedule_write()
        if self._timer is None:
            self._timer = self._loop.call_later(CHECK_EVERY_S, self._check_timeouts)

    def _progressed(self) -> None:
        """Wake those who wait for room, or for the last answer."""
        self._wake_for_room()
        if self._idle and self._accumulator.empty:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)

    def _wake_for_room(self) -> None:
        """Wake the caller that has waited longest. It stays first until it goes on."""
        if self._room and not self._accumulator.full and not self._room[0].done():
            self._room[0].set_result(None)

    def _schedule_write(self) -> None:
        if not self._write_scheduled:
            self._write_scheduled = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        """Write requests that may go out, about a mebibyte in one turn."""
        self._write_scheduled = False
        connection = self._connection
        if self._in_flight.stale_topics and self._refreshing is None and connection is not None:
            self._refreshing = self._loop.create_task(self._refresh_topics())
        if connection is None or connection.write_paused:
            return
        if not self._in_flight.awaits_replies:
            connection.last_received = self._loop.time()  # silence counts from here
        self._accumulator.expedite_silently()
        connection.write(self._in_flight.next_writes(connection.conversation))
        if self._in_flight.has_more:
            self._schedule_write()
        elif (pause := self._in_flight.paused_s) and self._resumption is None:
            self._resumption = self._loop.call_later(pause, self._resume)

    def _resume(self) -> None:
        """Go on after a pause that the broker has asked for."""
        self._resumption = None
        self._schedule_write()

    async def _refresh_topics(self) -> None:
        """Refresh stale topics. None of their messages goes out before."""
        try:
            for topic in sorted(self._in_flight.stale_topics):
                try:
                    await self._refresh(topic)
                except UnknownTopic:
                    self._topics.forget(topic)
                self._in_flight.stale_topics.discard(topic)
        except TxmqError as error:
            log.warning("send.topic_unknown", error=error.message)
            self._in_flight.pause()
        finally:
            self._refreshing = None
        self._schedule_write()

    def _check_timeouts(self) -> None:
        """Detect a silent broker, and fail requests that have waited too long."""
        self._timer = None
        connection = self._connection
        if connection is not None and self._in_flight.awaits_replies:
            silent_s = self._loop.time() - connection.last_received
            if silent_s > self._settings.timeout:
                connection.give_up(silent_for(silent_s))
            elif silent_s > self._settings.attempt_s and connection.conversation.has_other_nodes:
                connection.on_silence()
        if connection is None and self._failover_after is not None:
            self._in_flight.fail_unsent(time.monotonic() - self._failover_after)
        self._in_flight.expire(time.monotonic() - self._settings.delivery_timeout, "")
        self._progressed()
        if not self._accumulator.empty:
            self._appended()

    async def close(self) -> Counter[str]:
        """Fail all requests without an answer; return the numbers of messages by
        topic.
        """
        self._accumulator.close()
        for timer in (self._timer, self._resumption):
            if timer is not None:
                timer.cancel()
        self._timer = self._resumption = None
        closed = ClientClosed("the client was closed before the broker answered")
        failed = self._in_flight.fail_all(closed)
        for waiter in self._room:
            if not waiter.done():
                waiter.set_exception(closed)
        self._progressed()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        return failed


def _no_wake() -> None:
    """The sender schedules a write after each append, so no thread sleeps."""
