"""The members of a consumer on an event loop: callers wait here for messages of any of
them.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeAlias, TypeVar

from txmq.client.aio.consumer.group_member import LoopMember
from txmq.client.aio.core import AioCore, finish
from txmq.client.aio.loop import gather
from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.member_set import MemberSet
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.settings import CLOSE_S
from txmq.errors import TxmqError

T = TypeVar("T")
log = get_logger()
Operation: TypeAlias = Callable[[Operations, float], T]
MESSAGES_A_TURN = 64  # of one consumer, before other tasks get the loop


def _up_to(most: int) -> Operation[list[DeliveredMessage]]:
    return lambda operations, now: operations.receive_many(most, now)


# whose messages this task, or the one that has made it, works on
_working: ContextVar[LoopMembers | None] = ContextVar("txmq_working", default=None)


class LoopMembers(MemberSet[LoopMember]):
    """The members at the brokers of `cores`. `handlers` counts those with messages."""

    def __init__(
        self, cores: Sequence[AioCore], settings: ConsumerSettings, *, of_several: bool = False
    ) -> None:
        self.settings, self.core, self.loop = settings, cores[0], cores[0].loop
        self.handlers = 0
        self._taken = 0  # since a receiver has last waited
        self._idle_waiters: list[Future[None]] = []  # that wait for the last handler
        self._receivers: deque[Future[None]] = deque()
        self._closing: asyncio.Task[None] | None = None
        self._paced: asyncio.TimerHandle | None = None
        self._joining = set[AioCore]()
        members = [LoopMember(core, settings, self._wake) for core in cores]
        super().__init__(members, of_several=of_several)

    async def join(self, seconds: float) -> None:
        """Join the group wherever a broker answers in so many seconds.

        Raises BrokerUnavailable where none does, and the refusal of a broker.
        """
        try:
            await self._join(seconds)
        except BaseException:  # a refusal, or a cancellation at any await
            await self._abandon()
            raise

    async def _join(self, seconds: float) -> None:
        joins = [self.loop.create_task(member.when_serving()) for member in self.members]
        try:
            await asyncio.wait(joins, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for join in joins:
                join.cancel()
            await asyncio.gather(*joins, return_exceptions=True)
        error = self.join_error(seconds)
        if error is not None:
            raise error

    async def join_at(self, core: AioCore) -> None:
        """Join the group at a broker that was found. A refusal leaves the consumer as
        it is.
        """
        if self.closed or core in {one.core for one in self.members} | self._joining:
            return
        self._joining.add(core)
        member = LoopMember(core, self.later_settings(), self._wake)
        try:
            await member.when_serving()
        except TxmqError as error:
            log.warning("consumer.not_joined", group=member.group, error=str(error))
        finally:
            self._joining.remove(core)
            if member.serving and not self.closed:
                self.add(member)
                self._wake()
            else:
                await finish(self.loop.create_task(member.leave(CLOSE_S)))

    async def _abandon(self) -> None:
        await finish(self.loop.create_task(gather(member.abandon() for member in self.members)))

    async def receive(self, operation: Operation[T], seconds: float | None) -> T | None:
        """Return what the operation receives; None after so many seconds, and once the
        consumer is closed. Raises a member's failure. To cancel it loses no message.
        """
        self._taken += 1
        if self._taken < MESSAGES_A_TURN and not self._receivers:
            received = self._take(operation)
            if received:
                return received
        try:
            async with asyncio.timeout(seconds):
                return await self._receive(operation)
        except TimeoutError:
            return None

    async def _receive(self, operation: Operation[T]) -> T | None:
        while True:
            if self._taken >= MESSAGES_A_TURN:
                self._taken = 0
                await asyncio.sleep(0)
            received = self._take(operation)
            if received or self.closed:
                self._wake()  # there may be more
                return received
            waiter: Future[None] = self.loop.create_future()
            self._receivers.append(waiter)
            self._wake_in_pace()
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._receivers:
                    self._receivers.remove(waiter)
                else:
                    self._wake()  # somebody else may take what this one was woken for
                raise

    def _take(self, operation: Operation[T]) -> T | None:
        now = self.loop.time()
        for member in self.in_turn():
            if not member.closing:
                received = operation(member.operations, now)
                member.step_soon()
                if received:
                    return received
        return None

    def _wake(self) -> None:
        """Have the receiver that waits longest look for messages."""
        while self._receivers:
            waiter = self._receivers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _wake_in_pace(self) -> None:
        """Have a receiver look for messages once the pace allows for one."""
        pause = 0.0 if self.pace is None else self.pace.pause(self.loop.time())
        if pause and self._paced is None:
            self._paced = self.loop.call_later(pause, self._pause_over)

    def _pause_over(self) -> None:
        self._paced = None
        self._wake()

    async def receive_many(
        self, most: int, seconds: float | None, *, batch_wait: float = 0.0
    ) -> list[DeliveredMessage]:
        """Return at most so many messages; see `AioConsumer.receive_many`."""
        received = await self.receive(_up_to(most), seconds) or []
        if not batch_wait:
            return received
        try:
            return await self.filled(received, most, batch_wait)
        except asyncio.CancelledError:
            self.postpone(received)
            raise

    def postpone(self, messages: Sequence[DeliveredMessage]) -> None:
        """Have messages delivered again, as if this delivery had not been."""
        for message in messages:
            if message.in_hand:
                self.member_of(message).postpone(message, 0.0)

    async def filled(
        self, received: list[DeliveredMessage], most: int, seconds: float
    ) -> list[DeliveredMessage]:
        """Return these messages, if any, and more that come in so many seconds."""
        ends = self.loop.time() + seconds
        while seconds and 0 < len(received) < most:
            more = await self.receive(_up_to(most - len(received)), ends - self.loop.time())
            if not more:
                break
            received += more
        return received

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on messages inside the block; `close` waits for its end, unless the
        block calls it.
        """
        self.handlers += 1
        token = _working.set(self)
        try:
            yield
        finally:
            _working.reset(token)
            self.handlers -= 1
            if not self.handlers:
                waiters, self._idle_waiters = self._idle_waiters, []
                for waiter in waiters:
                    if not waiter.done():  # it has timed out
                        waiter.set_result(None)

    async def _wait_idle(self, seconds: float) -> None:
        if self.handlers:
            waiter: Future[None] = self.loop.create_future()
            self._idle_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=seconds)

    def stop_soon(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._stop_delivery)

    async def close(self) -> None:
        """Leave the groups. A cancelled call goes on to its end before it raises."""
        self.core.seconds()  # on this loop
        if self._closing is None:
            self._stop_delivery()
            self._closing = self.loop.create_task(self._leave(), name="txmq-consumer-close")
        if _working.get() is not self:
            await finish(self._closing)

    def _stop_delivery(self) -> None:
        if self._paced is not None:
            self._paced.cancel()
        for member in self.members:
            member.stop_delivery()
        for waiter in self._receivers:
            if not waiter.done():
                waiter.set_result(None)
        self._receivers.clear()

    async def _leave(self) -> None:
        await self._wait_idle(CLOSE_S)
        await asyncio.gather(*(member.leave(CLOSE_S) for member in self.members))
