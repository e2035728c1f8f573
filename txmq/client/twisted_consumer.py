"""Consuming with Twisted: an async iterator on the member without I/O that the blocking face drives as well."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from twisted.internet.defer import Deferred, fail, succeed
from twisted.python.failure import Failure

from txmq.client.consuming.hands import NO_ACK, AckAction, Delivered, Hands
from txmq.client.consuming.member import Member, Phase
from txmq.client.consuming.parcels import ReceivedBatch
from txmq.client.consuming.requests import Request
from txmq.client.consuming.settings import Settings
from txmq.client.consuming.settling import Stats
from txmq.client.twisted_link import Connected, Link, timed
from txmq.client.twisted_seams import Timer
from txmq.errors import BrokerUnavailable, ClientClosed, NotLeased, RequestRejected, RequestTimeout, TxmqError
from txmq.message import ReceivedMessage

if TYPE_CHECKING:
    from txmq.client.twisted_client import Client

CLOSE_S = 10.0
T = TypeVar("T")


class Consumer:
    """A member of a consumer group, for the reactor's thread. Made by `client.consumer`; as the blocking one otherwise.

    `async for message in consumer` gives messages until it is closed.
    """

    def __init__(self, client: Client, settings: Settings) -> None:
        self.settings = settings
        self._reactor = client.reactor
        self._member = Member(settings, uuid4().hex, owner=self)
        self._hands = Hands(self._member)
        self._link: Link | None = None
        self._timer: Timer | None = None
        self._takers: deque[tuple[Callable[[float], Any], Deferred[Any]]] = deque()
        self._listeners: list[tuple[Callable[[], object], Deferred[None]]] = []
        self._connected: Connected = client.connect_apart(self._attach)

    @property
    def stats(self) -> Stats:
        """What it has done so far."""
        return self._member.stats

    @property
    def assignment(self) -> frozenset[tuple[str, int]]:
        """The partitions that are this member's, (topic, number), as last heard."""
        seat = self._member.seat
        return frozenset() if seat is None else seat.assignment

    async def joined(self, patience: float) -> Consumer:
        """Itself, once it is a member. Called once, by `client.consumer`."""
        error = BrokerUnavailable(f"no broker let the consumer join within {patience} s")
        try:
            await timed(self._reactor, self._when(lambda: self._member.phase is Phase.SERVING), patience, error)
        except TxmqError as failure:
            await self._stop()
            raise self._connected.trouble or failure from failure
        return self

    def receive(self) -> Deferred[ReceivedMessage | None]:
        """The next message; None once the consumer is closed. To cancel it is to leave the message to the next one."""
        return self._take(lambda now: next(iter(self._hands.take(1, now)), None))

    def receive_batch(self) -> Deferred[ReceivedBatch | None]:
        """The messages of one delivery, as columns; otherwise as `receive`."""
        return self._take(self._hands.take_batch)

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.receive()) is not None:
            yield message

    async def batches(self) -> AsyncIterator[ReceivedBatch]:
        """Messages as they came together, until the consumer is closed."""
        while (batch := await self.receive_batch()) is not None:
            yield batch

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> Deferred[None]:
        """The message is processed. The Deferred fires at once, or if one is to `wait`, when the broker has it."""
        return self._acked(self._hands.ack(message, self._reactor.seconds()), wait=wait)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> Deferred[None]:
        """All messages of the batch are processed, but for those that were acked or nacked alone."""
        return self._acked(self._hands.ack_batch(batch, self._reactor.seconds()), wait=wait)

    def _acked(self, number: int, *, wait: bool) -> Deferred[None]:
        settling = self._member.settling
        settling.hurry |= wait
        self._step()
        if not wait:
            return succeed(None)
        if number == NO_ACK:
            return fail(NotLeased("the message is not in hand", hint="it was acked or nacked before, or given back"))
        return self._when(lambda: settling.acks.confirmed(number))

    def nack(
        self, message: ReceivedMessage, delay: float | None = None, error: BaseException | str | None = None
    ) -> None:
        """The message failed; it comes again after `delay` seconds, or by the policy of the group."""
        self._hands.nack(message, delay, error)
        self._step()

    def dead_letter(self, message: ReceivedMessage, reason: str) -> None:
        """The message goes to the dead letters at once."""
        self._hands.nack(message, None, reason, dead=True)
        self._step()

    def postpone(self, message: ReceivedMessage, delay: float | None = None) -> None:
        """The message comes again after `delay` seconds, as if it had not been delivered."""
        self._hands.postpone(message, delay)
        self._step()

    def ack_actions(self, delivered: Delivered) -> Sequence[AckAction]:
        """Hands a message, or what is in hand of a batch, over to a transaction; returns what acks it there."""
        return self._hands.lend(delivered)

    def transaction_over(self, delivered: Delivered, *, committed: bool | None) -> None:
        """The transaction has settled it; or it has not, and the message is in hand again; None = nobody knows."""
        self._hands.lent(delivered, self._reactor.seconds(), committed=committed)
        self._step()

    def pause(self) -> None:
        """Hands out nothing until `resume`; what waits here goes back to the group, and its share stays its own."""
        self._member.pause(paused=True)
        self._step()

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._member.pause(paused=False)
        self._step()

    def close(self) -> Deferred[None]:
        """Leaves the group, once the broker has everything; fires when that is done, or takes too long."""
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        self._member.leave()
        self._step()
        try:
            gone = self._when(lambda: self._member.phase is Phase.GONE or self._is_alone())
            await timed(self._reactor, gone, CLOSE_S, RequestTimeout("the broker did not hear the goodbye"))
        except TxmqError:  # its session will lapse
            self._member.failure = self._member.failure or ClientClosed("the consumer was closed")
        await self._stop()

    def _is_alone(self) -> bool:
        """Whether the broker is away, which need not hear the goodbye if there is nothing else to tell."""
        return self._link is None and self._member.settling.idle

    async def _stop(self) -> None:
        self._cancel_timer()
        await self._connected.stop()

    def _when(self, condition: Callable[[], object]) -> Deferred[None]:
        """Fires when it holds, fails when the member cannot go on."""
        listener: Deferred[None] = Deferred()
        self._listeners.append((condition, listener))
        self._tell()
        return listener

    def _take(self, take: Callable[[float], T | None]) -> Deferred[T | None]:
        taker: Deferred[T | None] = Deferred()
        self._takers.append((take, taker))
        self._step()
        return taker

    def _attach(self, link: Link) -> None:
        self._link = link
        self._member.connected(self._reactor.seconds())
        link.lost.addCallback(lambda _none: self._lost(link))
        self._step()

    def _lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._member.lost(self._reactor.seconds())
            self._step()

    def _step(self) -> None:
        """Hands out what has come, and sends what is due."""
        self._serve()
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
        reply.addCallbacks(partial(self._answered, request), partial(self._unanswered, link, request))
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

    def _serve(self) -> None:
        while self._takers:
            take, taker = self._takers[0]
            if taker.called:  # cancelled
                self._takers.popleft()
                continue
            try:
                found = None if self._member.closing else take(self._reactor.seconds())
            except TxmqError as error:
                self._takers.popleft()
                taker.errback(error)
                continue
            if not found and not self._member.closing:
                return
            self._takers.popleft()
            taker.callback(found)

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
