"""Sends of the Twisted face: what is put in during one turn of the reactor goes out
together.

Rules and frames are those of the blocking client's pipeline: `Outbox` and `Flights`,
which do no I/O of their own.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from threading import get_ident
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

from txmq.client.log import get_logger
from txmq.client.protocol.conversation import Payload
from txmq.client.protocol.sender.accumulator import Accumulator
from txmq.client.protocol.sender.in_flight import Flights
from txmq.client.protocol.sender.topics import Topics
from txmq.client.protocol.settings import Settings
from txmq.client.twisted.connection import Link
from txmq.client.twisted.protocols import Reactor
from txmq.errors import ClientClosed, Throttled, TxmqError, UnknownTopic
from txmq.model.message import Message, Receipt
from txmq.wire.frames import Frame

LOOK_EVERY_S = 0.25  # at what takes too long
T = TypeVar("T")
log = get_logger()


class Sending:
    """Everything here belongs to the reactor's thread. `refresh` asks the broker about
    a topic.
    """

    def __init__(
        self,
        reactor: Reactor,
        topics: Topics,
        settings: Settings,
        refresh: Callable[[str], Awaitable[object]],  # several interfaces of Twisted's
        elsewhere_after: float | None = None,
    ) -> None:
        """`elsewhere_after`: where there are other brokers, so many seconds may a
        message wait for the first connection that could go to any of them; nor does it
        wait for a lost one.
        """
        self._elsewhere_after = elsewhere_after
        self._reactor, self._topics, self._settings, self._refresh = (
            reactor,
            topics,
            settings,
            refresh,
        )
        self._outbox = Accumulator(
            topics, messages=settings.window, size=settings.window_bytes, wake=_nobody_sleeps
        )
        self._flights = Flights(topics, self._outbox)
        self._link: Link | None = None
        self._open = 0
        self._pumping = self._refreshing = False
        self._loop = LoopingCall(self._look)
        self._loop.clock = reactor

    @property
    def idle(self) -> bool:
        """Whether everything has its answer."""
        return self._outbox.empty

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._link is not None

    def put(self, topic: str, message: Message, partition: int | None) -> Deferred[Receipt]:
        """Sends a message whose topic is known, for its receipt. Raises Throttled, and
        as `send` does.
        """
        if self._open >= self._settings.window:
            raise Throttled(
                f"{self._open} messages wait for their receipts",
                hint="wait for some, or raise `window`",
            )
        self._outbox.reader = get_ident()  # who empties the outbox must not wait for room in it
        return self._promised(self._outbox.put(topic, message, partition, 0.0))

    def carry(
        self,
        opcode: int,
        payload: Payload,
        decode: Callable[[bytes], T] = bytes,  # type: ignore[assignment]  # as of Outbox.carry
        rebuild: Callable[[], bytes] | None = None,
    ) -> Deferred[T]:
        """Makes a request that does no harm twice: it is made again after a lost
        connection.
        """
        return self._promised(self._outbox.carry(opcode, payload, decode, rebuild))

    def _promised(self, future: Future[T]) -> Deferred[T]:
        answer: Deferred[T] = Deferred()
        self._open += 1

        def done(future: Future[T]) -> None:
            self._open -= 1
            error = future.exception()
            if error is None:
                answer.callback(future.result())
            else:
                answer.errback(error)

        future.add_done_callback(done)
        self._soon()
        if not self._loop.running:
            self._loop.start(LOOK_EVERY_S, now=False).addErrback(_failed)
        return answer

    def attach(self, link: Link) -> None:
        """There is a connection."""
        self._link = link
        link.drained = self._soon
        link.lost.addCallback(lambda _none: self._lost(link))
        self._soon()

    def _lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._flights.lost()
            if self._elsewhere_after is not None:
                self._flights.give_back(time.monotonic())

    def received(self, frames: Sequence[Frame]) -> None:
        """Replies to what was sent here."""
        self._flights.received(frames)
        self._soon()

    def _soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._reactor.callLater(0, self._pump)

    def _pump(self) -> None:
        """Writes what may go out, about a mebibyte in one turn."""
        self._pumping = False
        link = self._link
        if self._flights.stale and not self._refreshing and link is not None:
            self._refreshing = True
            Deferred.fromCoroutine(self._learn()).addErrback(_failed)
        if link is None or link.full:
            return
        if not self._flights.awaits_replies:
            link.heard = self._reactor.seconds()  # silence counts from here
        link.write(self._flights.fill(link.conversation))
        if self._flights.has_more:
            self._soon()

    async def _learn(self) -> None:
        """Topics have grown: nothing of theirs may go out before their shape is
        known.
        """
        try:
            for topic in sorted(self._flights.stale):
                try:
                    await self._refresh(topic)
                except UnknownTopic:
                    self._topics.forget(topic)
                self._flights.stale.discard(topic)
        except TxmqError as error:
            log.warning("send.topic_unknown", error=error.message)
            self._flights.pause()
        finally:
            self._refreshing = False
        self._soon()

    def _look(self) -> None:
        """Now and then, for a broker that has gone silent and for what has waited too
        long.
        """
        link, now = self._link, self._reactor.seconds()
        if (
            link is not None
            and self._flights.awaits_replies
            and now - link.heard > self._settings.timeout
        ):
            link.abort()
        if link is None and self._elsewhere_after is not None:
            self._flights.give_back(time.monotonic() - self._elsewhere_after)
        self._flights.expire(time.monotonic() - self._settings.delivery_timeout, "")
        if self._outbox.empty:
            self._loop.stop()
        else:
            self._soon()

    def close(self) -> None:
        """What has no answer yet fails."""
        self._outbox.close()
        self._flights.give_up(ClientClosed("the client was closed before the broker answered"))
        if self._loop.running:
            self._loop.stop()


def _nobody_sleeps() -> None:
    """The pump is called where something is put in."""


def _failed(failure: Failure) -> None:
    log.error("send.failed", error=failure.getErrorMessage(), traceback=failure.getTraceback())
