"""A member of a consumer group with its connection, on the reactor's thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from txmq.client.protocol.consumer.checked_operations import operations_type
from txmq.client.protocol.consumer.event_member import EventMember
from txmq.client.protocol.consumer.member import Member, MemberPhase, steady_wall_us
from txmq.client.protocol.consumer.operations import (
    Delivered,
    ack_error,
)
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.twisted.connection import PersistentConnection, TwistedConnection, with_timeout
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import DelayedCall
from txmq.errors import ClientClosed, RequestRejected, RequestTimeout, TxmqError

if TYPE_CHECKING:
    from txmq.client.blocking.consumer.local_stores import StoreThread


class ReactorMember(EventMember):
    """A member at one broker.

    `deliver` is called with the member when messages may have come.
    """

    def __init__(
        self,
        core: TwistedCore,
        settings: ConsumerSettings,
        deliver: Callable[[ReactorMember], None],
    ) -> None:
        self.core, self._log, self.settings = core, core, settings
        self._deliver = deliver
        self._reactor = core.reactor
        self.member = Member(settings, uuid4().hex, owner=self)
        self.operations = operations_type(settings)(self.member)
        self._link: TwistedConnection | None = None
        self._timer: DelayedCall | None = None
        self._waiting: list[tuple[Callable[[], object], Deferred[None]]] = []
        self._store_thread: StoreThread | None = None
        if self.member.recovery is not None:
            self.member.recovery.work_added = self._submit_store_jobs
        self._connection: PersistentConnection = core.open_connection(self._attach, self._refused)

    @property
    def trouble(self) -> TxmqError | None:
        """The error that keeps the member from its broker for now."""
        return self._connection.error

    def open_stores(self) -> StoreThread:
        # The store's modules are for those who have one.
        from txmq.client.blocking.consumer.local_stores import (  # noqa: PLC0415
            LocalStores,
            StoreThread,
        )

        stores = LocalStores(self.settings, lambda: self.log_id, steady_wall_us)
        post = partial(self._reactor.callFromThread, self.on_store_result)
        return StoreThread(stores, post)

    def when_serving(self) -> Deferred[None]:
        """Fire once the member has joined; fail with its failure."""
        return self._when(lambda: self.serving)

    def when_confirmed(self, number: int, delivered: Delivered) -> Deferred[None]:
        """Fire when the broker has the ack of that number in its log.

        Fails with NotLeased where the ack changed nothing or came too late.
        """

        def check(_none: None) -> None:
            error = ack_error(self.operations, number, delivered)
            if error is not None:
                raise error

        acks = self.member.settlement.acks
        return self._when(lambda: acks.is_confirmed(number)).addCallback(check)

    async def leave(self, seconds: float) -> None:
        """Leave the group once the broker has everything, within so many seconds."""
        self.member.leave()
        self.step()
        try:
            left = self._when(self._has_left)
            late = RequestTimeout("the broker did not confirm that the member left its group")
            await with_timeout(self._reactor, left, seconds, late)
        except TxmqError:  # its session will lapse
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
            await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), stopped)

    def now(self) -> float:
        return float(self._reactor.seconds())

    def step_soon(self) -> None:
        self.step()

    def step(self) -> None:
        """Deliver messages that have come, and send requests that are due."""
        self._deliver(self)
        link, now = self._link, self.now()
        if link is not None and self.member.needs_reconnect:
            link.abort()
        elif link is not None:
            for request in self.member.requests(now):
                self._send(link, request)
            self._set_timer(now)
        self._check_waiting()

    def _when(self, condition: Callable[[], object]) -> Deferred[None]:
        """Fire when the condition holds, fail with the member's failure."""
        waiting: Deferred[None] = Deferred()
        self._waiting.append((condition, waiting))
        self._check_waiting()
        return waiting

    def _check_waiting(self) -> None:
        failure = self.member.failure
        for item in list(self._waiting):
            condition, waiting = item
            if waiting.called:
                self._waiting.remove(item)
            elif condition():
                self._waiting.remove(item)
                waiting.callback(None)
            elif failure is not None:
                self._waiting.remove(item)
                waiting.errback(failure)

    def _attach(self, link: TwistedConnection) -> None:
        self._link = link
        self.member.connected(self.now())
        link.lost.addCallback(lambda _none: self._lost(link))
        self.step()

    def _refused(self, error: TxmqError) -> None:
        self.member.failure = error
        self.step()

    def _lost(self, link: TwistedConnection) -> None:
        if self._link is link:
            self._link = None
            self.member.disconnected(self.now())
            self.step()

    def _send(self, link: TwistedConnection, request: Request) -> None:
        reply = with_timeout(
            self._reactor,
            link.request(request.opcode, request.payload),
            request.timeout_s,
            RequestTimeout("no answer"),
        )
        reply.addCallbacks(
            partial(self._answered, request), partial(self._unanswered, link, request)
        )
        reply.addErrback(partial(self._invalid_answer, link))

    def _answered(self, request: Request, payload: bytes) -> None:
        request.reply(payload, self.now())
        self.step()

    def _unanswered(self, link: TwistedConnection, request: Request, failure: Failure) -> None:
        """React to a refusal; without an answer, end the connection."""
        if isinstance(failure.value, RequestRejected):
            request.refused(failure.value, self.now())
            self.step()
        else:
            link.abort()

    def _invalid_answer(self, link: TwistedConnection, failure: Failure) -> None:
        failure.trap(TxmqError)
        link.abort()

    def _set_timer(self, now: float) -> None:
        due = self.member.wake_at()
        self._cancel_timer()
        if due is not None:
            self._timer = self._reactor.callLater(max(0.0, due - now), self.step)

    def _cancel_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
