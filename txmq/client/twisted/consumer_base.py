"""What a consumer with Twisted is, apart from its messages: a member, and what keeps it
one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self, TypeVar
from uuid import UUID, uuid4

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from txmq.client.protocol.consumer.member import Member, Phase
from txmq.client.protocol.consumer.membership import Seated
from txmq.client.protocol.consumer.operations import Hands
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.consumer.settings import Settings
from txmq.client.protocol.consumer.settling import Stats
from txmq.client.twisted.connection import Connected, Link, timed
from txmq.client.twisted.core import Core
from txmq.client.twisted.protocols import Timer
from txmq.client.twisted.receiving import Take, Takers, Taking
from txmq.errors import BrokerUnavailable, ClientClosed, RequestRejected, RequestTimeout, TxmqError
from txmq.model.message import ReceivedMessage

CLOSE_S = 10.0
T = TypeVar("T")


class ConsumerBase(Seated, Taking):
    """A member of a consumer group, for the reactor's thread."""

    def __init__(self, core: Core, settings: Settings, takers: Takers | None = None) -> None:
        """`takers` are given where it is one of several brokers' members that are
        waited for together.
        """
        super().__init__()
        self.core, self.settings = core, settings
        self.parts = (self,)
        self._is_part = takers is not None
        self._reactor = core.reactor
        self._member = Member(settings, uuid4().hex, owner=self)
        self._hands = Hands(self._member)
        self._link: Link | None = None
        self._timer: Timer | None = None
        self._takers = takers or Takers(core.reactor, lambda: self.closed)
        self._listeners: list[tuple[Callable[[], object], Deferred[None]]] = []
        self._connected: Connected = core.connect_apart(self._attach, self._refused)

    @property
    def stats(self) -> Stats:
        """What it has done so far."""
        return self._member.stats

    @property
    def log_id(self) -> UUID | None:
        """The log that its messages are of, as soon as there was a connection."""
        return self.core.known_log_id

    @property
    def inbox_name(self) -> str:
        """Its group as the inbox knows it, once there was a connection; as with the
        blocking face.
        """
        return f"{self.group}#{self.log_id}" if self._is_part else self.group

    def inbox_of(self, message: ReceivedMessage) -> str:
        """The group that the inbox counts the message in."""
        del message
        return self.inbox_name

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Adds to the stats what only handlers know."""
        self._member.stats.duplicates += duplicates
        self._member.stats.retried += retried

    @property
    def closed(self) -> bool:
        """Whether it hands out nothing more."""
        return self._member.closing

    @property
    def serving(self) -> bool:
        """Whether it is a member as far as it knows, and connected."""
        return self._member.phase is Phase.SERVING

    @property
    def failure(self) -> TxmqError | None:
        """Why it cannot go on."""
        return self._member.failure

    @property
    def trouble(self) -> TxmqError | None:
        """What keeps it from its broker for now."""
        return self._connected.trouble

    @property
    def assignment(self) -> frozenset[tuple[str, int]]:
        """The partitions that are this member's, (topic, number), as last heard."""
        seat = self._member.seat
        return frozenset() if seat is None else seat.assignment

    async def joined(self, patience: float) -> Self:
        """Itself, once it is a member. Called once, by `client.consumer`."""
        error = BrokerUnavailable(f"no broker let the consumer join within {patience} s")
        try:
            await timed(self._reactor, self.when_serving(), patience, error)
        except TxmqError as failure:
            await self.abandon()
            raise self._connected.trouble or failure from failure
        return self

    def when_serving(self) -> Deferred[None]:
        """Fires once it is a member, fails with why it cannot be."""
        return self._when(lambda: self.serving)

    def take_from(self, take: Take[T]) -> T | None:
        """What `take` finds here. Raises why the consumer cannot go on."""
        return None if self.closed else take(self._hands, self._reactor.seconds())

    def look(self) -> None:
        """Hands out what is there, and asks for more where there is room."""
        self._step()

    def _awaited(self) -> None:
        self._step()

    def take_no_more(self) -> None:
        """Hands out nothing more, and gives back what waits here."""
        self._member.close()
        self._step()

    def close(self) -> Deferred[None]:
        """Leaves the group, once handlers are done and the broker has everything; fires
        when that is so, or takes too long. Not for handlers.
        """
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        self.take_no_more()
        await self._handlers_done(CLOSE_S)
        self._member.leave()
        self._step()
        try:
            gone = self._when(lambda: self._member.phase is Phase.GONE or self._is_alone())
            await timed(
                self._reactor, gone, CLOSE_S, RequestTimeout("the broker did not hear the goodbye")
            )
        except TxmqError:  # its session will lapse
            self._member.failure = self._member.failure or ClientClosed("the consumer was closed")
        await self.abandon()

    def _is_alone(self) -> bool:
        """Whether the broker is away, which need not hear the goodbye if there is
        nothing else to tell.
        """
        return self._link is None and self._member.settling.idle

    async def abandon(self) -> None:
        """Ends without a word to the broker."""
        self._cancel_timer()
        await self._connected.stop()

    def _when(self, condition: Callable[[], object]) -> Deferred[None]:
        """Fires when it holds, fails when the member cannot go on."""
        listener: Deferred[None] = Deferred()
        self._listeners.append((condition, listener))
        self._tell()
        return listener

    def _attach(self, link: Link) -> None:
        self._link = link
        self._member.connected(self._reactor.seconds())
        link.lost.addCallback(lambda _none: self._lost(link))
        self._step()

    def _refused(self, error: TxmqError) -> None:
        self._member.failure = error
        self._step()

    def _lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._member.lost(self._reactor.seconds())
            self._step()

    def _step(self) -> None:
        """Hands out what has come, and sends what is due."""
        self._takers.serve(self.take_from)
        link, now = self._link, self._reactor.seconds()
        if link is not None and self._member.wants_reconnect:
            link.abort()
        elif link is not None:
            for request in list(self._member.requests(now)):
                self._ask(link, request)
            self._set_timer(now)
        self._tell()

    def _ask(self, link: Link, request: Request) -> None:
        reply = timed(
            self._reactor,
            link.request(request.opcode, request.payload),
            request.patience_s,
            RequestTimeout("no answer"),
        )
        reply.addCallbacks(
            partial(self._answered, request), partial(self._unanswered, link, request)
        )
        reply.addErrback(partial(self._broken, link))

    def _answered(self, request: Request, payload: bytes) -> None:
        request.reply(payload, self._reactor.seconds())
        self._step()

    def _unanswered(self, link: Link, request: Request, failure: Failure) -> None:
        """A no; or no answer, and then the connection is of no more use."""
        if isinstance(failure.value, RequestRejected):
            request.refused(failure.value, self._reactor.seconds())
            self._step()
        else:
            link.abort()

    def _broken(self, link: Link, failure: Failure) -> None:
        """An answer that makes no sense."""
        failure.trap(TxmqError)
        link.abort()

    def _tell(self) -> None:
        failure = self._member.failure
        for item in list(self._listeners):
            condition, listener = item
            if listener.called:
                self._listeners.remove(item)
            elif condition():
                self._listeners.remove(item)
                listener.callback(None)
            elif failure is not None:
                self._listeners.remove(item)
                listener.errback(failure)

    def _set_timer(self, now: float) -> None:
        due = self._member.wake_at()
        self._cancel_timer()
        if due is not None:
            self._timer = self._reactor.callLater(max(0.0, due - now), self._step)

    def _cancel_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
