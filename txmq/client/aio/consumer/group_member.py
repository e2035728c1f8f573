"""A member of a consumer group with its connection, on an event loop."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from txmq.client.aio.connection import AioConnection, PersistentConnection
from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import expire
from txmq.client.protocol.consumer.checked_operations import operations_type
from txmq.client.protocol.consumer.member import Member, MemberPhase, steady_wall_us
from txmq.client.protocol.consumer.member_set import MemberState
from txmq.client.protocol.consumer.operations import Delivered, ack_error
from txmq.client.protocol.consumer.requests import DOUBT_S, Request
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.errors import (
    ClientClosed,
    ConnectionLost,
    RequestRejected,
    RequestTimeout,
    TxmqError,
)
from txmq.model.actions import AckAction
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from txmq.client.blocking.consumer.local_stores import StoreThread
    from txmq.client.protocol.consumer.store_jobs import JobResult


class LoopMember(MemberState):
    """A member at one broker. What changes it takes a step, which sends the requests
    that are due.

    `deliver` is called when messages may have come.
    """

    def __init__(
        self, core: AioCore, settings: ConsumerSettings, deliver: Callable[[], None]
    ) -> None:
        self.core, self.settings = core, settings
        self._deliver, self._loop = deliver, core.loop
        self.member = Member(settings, uuid4().hex, owner=self)
        self.operations = operations_type(settings)(self.member)
        self._link: AioConnection | None = None
        self._timer: asyncio.Handle | None = None  # uvloop's does not say when
        self._timer_at = 0.0
        self._step_scheduled = False
        self._waiting: list[tuple[Callable[[], object], Future[None]]] = []
        self._store_thread: StoreThread | None = None
        if self.member.recovery is not None:
            self.member.recovery.work_added = self._submit_store_jobs
        self._connection: PersistentConnection = core.open_connection(self._attach, self._refused)

    @property
    def trouble(self) -> TxmqError | OSError | None:
        """The error that keeps the member from its broker for now."""
        return self._connection.error

    @property
    def paused(self) -> frozenset[str]:
        """The paused topics."""
        return self.member.fetcher.paused

    @property
    def stats(self) -> ConsumerStats:
        """A copy of the counters."""
        return self.counters()

    @property
    def log_id(self) -> UUID | None:
        """The broker's log that the messages are of; None before the first
        connection.
        """
        return self.core.known_log_id

    def set_workers(self, workers: int) -> None:
        """Let so many handlers have messages of the local store at a time."""
        if self.member.recovery is not None:
            self.member.recovery.capacity = workers

    def _submit_store_jobs(self) -> None:
        """Have the local store's work done, in a thread."""
        recovery = self.member.recovery
        for job in [] if recovery is None else recovery.jobs(self.now()):
            self._store_thread = self._store_thread or self._open_stores()
            self._store_thread.submit(job)

    def _open_stores(self) -> StoreThread:
        # The store's modules are for those who have one.
        from txmq.client.blocking.consumer.local_stores import (  # noqa: PLC0415
            LocalStores,
            StoreThread,
        )

        stores = LocalStores(self.settings, lambda: self.log_id, steady_wall_us)
        return StoreThread(stores, self._post_store_result)

    def _post_store_result(self, result: JobResult | None) -> None:
        """Pass a result to the loop. Called in the store's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_store_result, result)

    def _on_store_result(self, result: JobResult | None) -> None:
        """Go on with a result of the store's thread; None: some time has passed."""
        recovery = self.member.recovery
        if recovery is not None and result is not None:
            recovery.finished(result, self.now())
            self.step()
        elif recovery is not None:
            recovery.tick(self.now())

    async def when_serving(self) -> None:
        """Wait until the member has joined. Raises its failure."""
        await self._when(lambda: self.serving)

    async def when_confirmed(self, number: int, delivered: Delivered) -> None:
        """Wait until the broker has the ack of that number in its log.

        Raises NotLeased where the ack changed nothing or came too late.
        """
        acks = self.member.settlement.acks
        await self._when(lambda: acks.is_confirmed(number))
        error = ack_error(self.operations, number, delivered)
        if error is not None:
            raise error

    async def leave(self, seconds: float) -> None:
        """Leave the group once the broker has everything, within so many seconds."""
        self.member.leave()
        self.step()
        try:
            async with asyncio.timeout(seconds):
                await self._when(self._has_left)
        except (TxmqError, TimeoutError):  # its session will lapse
            self.member.leave_behind()
            self.member.failure = self.member.failure or ClientClosed("the consumer was closed")
        await self.abandon()

    def _has_left(self) -> bool:
        """Return whether there is nothing left to send. A broker that is away need not
        get the leave request.
        """
        return self.member.phase is MemberPhase.GONE or (
            self.member.away and self.member.idle_without_broker
        )

    async def abandon(self) -> None:
        """End without a request to the broker. What is in the local store stays."""
        self._cancel_timer()
        await self._connection.stop()
        if self._store_thread is not None:
            stopped = self._store_thread.stop
            self._store_thread = None
            await asyncio.to_thread(stopped)

    def now(self) -> float:
        return self._loop.time()

    def step_soon(self) -> None:
        """Take a step once the calls of this turn of the loop are made."""
        if not self._step_scheduled:
            self._step_scheduled = True
            self._loop.call_soon(self.step)

    def step(self) -> None:
        """Deliver messages that have come, and send requests that are due."""
        self._step_scheduled = False
        self._deliver()
        link, now = self._link, self.now()
        if link is not None and self.member.needs_reconnect:
            link.abort()
        elif link is not None:
            for request in self.member.requests(now):
                self._send(link, request)
            self._set_timer(now)
        self._check_waiting()

    def acks_added(self, *, wait: bool = False) -> None:
        """Have new acks sent; at once for a caller that is going to `wait`."""
        self.member.settlement.flush_now |= wait
        self.step_soon()

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        self.operations.ack_many(messages, self.now())
        self.step_soon()

    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None,
        error: BaseException | str | None,
        *,
        dead: bool = False,
    ) -> None:
        self.operations.nack(message, delay, error, dead=dead)
        self.step_soon()

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None,
        error: BaseException | str | None,
    ) -> None:
        self.operations.nack_many(messages, delay, error)
        self.step_soon()

    def postpone(self, message: ReceivedMessage, delay: float | None) -> None:
        self.operations.postpone(message, delay)
        self.step_soon()

    def extend(self, message: ReceivedMessage, seconds: float | None) -> None:
        self.operations.extend(message, seconds, self.now())

    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None:
        for message in messages:
            self.operations.give_back(message, self.now(), rejoin=rejoin)
        self.step_soon()

    def rejoin(self) -> None:
        """Join the group anew, and deliver nothing before."""
        self.member.rejoin()
        self.step_soon()

    def pause(self, topics: Sequence[str], *, paused: bool) -> None:
        self.member.pause(topics, paused=paused)
        self.step_soon()

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Add to the counters of the inbox."""
        self.member.stats.duplicates += duplicates
        self.member.stats.retried += retried

    def ack_actions(self, delivered: Delivered) -> Sequence[AckAction]:
        """Leave the outstanding messages to a transaction; return the actions that ack
        them in it. Raises NotLeased where there are none.
        """
        return self.operations.add_to_transaction(delivered)

    def transaction_ended(self, delivered: Delivered, *, committed: bool | None) -> None:
        """Settle the messages of a transaction, or make them outstanding again. None:
        its outcome is unknown.
        """
        self.operations.transaction_ended(delivered, self.now(), committed=committed)
        self.step_soon()

    def stop_delivery(self) -> None:
        """Deliver nothing more, and return what waits in the local queue."""
        self.member.close()
        self.step()

    async def _when(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds. Raises the member's failure."""
        if condition():
            return
        if self.member.failure is not None:
            raise self.member.failure
        item = (condition, self._loop.create_future())
        self._waiting.append(item)
        try:
            await item[1]
        finally:
            if item in self._waiting:
                self._waiting.remove(item)

    def _check_waiting(self) -> None:
        if not self._waiting:
            return
        failure = self.member.failure
        for item in list(self._waiting):
            condition, waiting = item
            if waiting.done():
                self._waiting.remove(item)
            elif condition():
                self._waiting.remove(item)
                waiting.set_result(None)
            elif failure is not None:
                self._waiting.remove(item)
                waiting.set_exception(failure)

    def _attach(self, link: AioConnection) -> None:
        self._link = link
        self.member.connected(self.now())
        link.lost.add_done_callback(lambda _lost: self._lost(link))
        self.step()

    def _refused(self, error: TxmqError) -> None:
        self.member.failure = error
        self.step()

    def _lost(self, link: AioConnection) -> None:
        if self._link is link:
            self._link = None
            self.member.disconnected(self.now())
            self.step()

    def _send(self, link: AioConnection, request: Request) -> None:
        try:
            reply = link.request(request.opcode, request.payload)
        except ConnectionLost:  # `_lost` follows
            return
        link.doubt_after(request.timeout_s - DOUBT_S, reply)
        expire(self._loop, reply, request.timeout_s, RequestTimeout("no answer"))
        reply.add_done_callback(partial(self._replied, link, request))

    def _replied(self, link: AioConnection, request: Request, reply: Future[bytes]) -> None:
        """Pass on a reply; without a valid one, end the connection."""
        error = reply.exception()
        if isinstance(error, RequestRejected):
            request.refused(error, self.now())
        elif isinstance(error, RequestTimeout):
            link.give_up(error)
            return
        elif error is not None:
            link.abort()
            return
        else:
            try:
                request.reply(reply.result(), self.now())
            except TxmqError:
                link.abort()
                return
        self.step()

    def _set_timer(self, now: float) -> None:
        """Take a step when something is due; an earlier step does no harm."""
        due = self.member.wake_at()
        if due is None:
            self._cancel_timer()
        elif self._timer is None or due < self._timer_at:
            self._cancel_timer()
            self._timer_at = due
            self._timer = self._loop.call_at(max(due, now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.step()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
