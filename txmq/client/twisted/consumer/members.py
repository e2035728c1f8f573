"""The members of a consumer on the reactor: callers wait here for messages of any of
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from twisted.internet.defer import Deferred, DeferredList, FirstError, gatherResults

from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.member_set import MemberSet
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.settings import CLOSE_S
from txmq.client.twisted.connection import none_on_timeout, with_timeout
from txmq.client.twisted.consumer.group_member import ReactorMember
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import DelayedCall
from txmq.errors import BrokerUnavailable, TxmqError

T = TypeVar("T")
Operation: TypeAlias = Callable[[Operations, float], T]


def _up_to(most: int) -> Operation[list[DeliveredMessage]]:
    return lambda operations, now: operations.receive_many(most, now)


class ReactorMembers(MemberSet[ReactorMember]):
    """The members at the brokers of `cores`. `handlers` counts those with messages."""

    def __init__(self, cores: Sequence[TwistedCore], settings: ConsumerSettings) -> None:
        self.settings, self.reactor = settings, cores[0].reactor
        self.handlers = 0
        self._idle_waiters: list[Deferred[None]] = []  # that wait for the last handler
        self._receivers: deque[tuple[Operation[Any], Deferred[Any]]] = deque()
        self._paced: DelayedCall | None = None
        super().__init__([ReactorMember(core, settings, self._deliver) for core in cores])

    async def join(self, seconds: float) -> None:
        """Join the group wherever a broker answers in so many seconds.

        Raises BrokerUnavailable where none does, and the refusal of a broker.
        """
        joined = DeferredList(
            [member.when_serving() for member in self.members],
            fireOnOneErrback=True,
            consumeErrors=True,
        )
        late = BrokerUnavailable("a broker is away")  # replaced by `join_error`
        try:
            await with_timeout(self.reactor, joined, seconds, late)
        except (FirstError, TxmqError):
            error = self.join_error(seconds)
            if error is None:
                return
            if self.single is not None:
                error = self.single.trouble or error
            await gatherResults(
                [Deferred.fromCoroutine(member.abandon()) for member in self.members]
            )
            raise error from None

    def receive(self, operation: Operation[T], timeout: float | None) -> Deferred[T | None]:
        """Fire with what the operation receives; with None after so many seconds, and
        once the consumer is closed. Fails with a member's failure.
        """
        receiver: Deferred[T | None] = Deferred()
        self._receivers.append((operation, receiver))
        if timeout is not None:
            receiver.addTimeout(max(0.0, timeout), self.reactor, none_on_timeout)
        for member in self.in_turn():
            member.step()
        return receiver

    def _deliver(self, member: ReactorMember) -> None:
        """Serve the receivers, in their order, from this member."""
        while self._receivers:
            operation, receiver = self._receivers[0]
            if receiver.called:  # cancelled
                self._receivers.popleft()
                continue
            received = None
            try:
                if not member.closing:
                    received = operation(member.operations, self.reactor.seconds())
            except TxmqError as error:
                self._receivers.popleft()
                receiver.errback(error)
                continue
            if not received and not self.closed:
                self._step_in_pace()
                return
            self._receivers.popleft()
            receiver.callback(received or None)

    def _step_in_pace(self) -> None:
        """Look for messages once the pace allows for one."""
        pause = 0.0 if self.pace is None else self.pace.pause(self.reactor.seconds())
        if pause and self._paced is None:
            self._paced = self.reactor.callLater(pause, self._pause_over)

    def _pause_over(self) -> None:
        self._paced = None
        for member in self.in_turn():
            member.step()

    def receive_many(
        self, most: int, timeout: float | None, *, batch_wait: float = 0.0
    ) -> Deferred[list[DeliveredMessage]]:
        first = self.receive(_up_to(most), timeout)
        if not batch_wait:
            return first.addCallback(lambda received: received or [])
        return first.addCallback(
            lambda received: Deferred.fromCoroutine(self.filled(received or [], most, batch_wait))
        )

    async def filled(
        self, received: list[DeliveredMessage], most: int, seconds: float
    ) -> list[DeliveredMessage]:
        """Return these messages, if any, and more that come in so many seconds."""
        ends = self.reactor.seconds() + seconds
        while seconds and 0 < len(received) < most:
            more = await self.receive(_up_to(most - len(received)), ends - self.reactor.seconds())
            if not more:
                break
            received += more
        return received

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on messages inside the block; `close` waits for its end."""
        self.handlers += 1
        try:
            yield
        finally:
            self.handlers -= 1
            if not self.handlers:
                waiters, self._idle_waiters = self._idle_waiters, []
                for waiter in waiters:
                    if not waiter.called:  # it has timed out
                        waiter.callback(None)

    async def _wait_idle(self, seconds: float) -> None:
        if self.handlers:
            waiter: Deferred[None] = Deferred()
            self._idle_waiters.append(waiter)
            await waiter.addTimeout(seconds, self.reactor, none_on_timeout)

    async def close(self) -> None:
        if self._paced is not None:
            self._paced.cancel()
            self._paced = None
        for member in self.members:
            member.stop_delivery()
        await self._wait_idle(CLOSE_S)
        await gatherResults(
            [Deferred.fromCoroutine(member.leave(CLOSE_S)) for member in self.members]
        )
