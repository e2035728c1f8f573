"""Sends of the Twisted client: messages of one turn of the reactor go out together.

The protocol is that of the blocking client's sender: `Accumulator` and
`InFlightRequests`, which do no I/O.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from threading import get_ident
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

from txmq.client.log import get_logger
from txmq.client.protocol.sender.accumulator import Accumulator, SideRequest
from txmq.client.protocol.sender.in_flight import InFlightRequests
from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.settings import ClientSettings
from txmq.client.twisted.connection import TwistedConnection
from txmq.client.twisted.protocols import DelayedCall, Reactor
from txmq.errors import ClientClosed, Throttled, TxmqError, UnknownTopic
from txmq.model.message import Message, Receipt
from txmq.wire.frames import Frame

CHECK_EVERY_S = 0.25  # for time-outs
T = TypeVar("T")
log = get_logger()


class TwistedSender:
    """The sender of a Twisted client, for the reactor's thread.

    `refresh` asks the broker about a topic.
    """

    def __init__(
        self,
        reactor: Reactor,
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
        self._reactor, self._topics = reactor, topics
        self._settings, self._refresh = settings, refresh
        self._accumulator = Accumulator(
            topics, messages=settings.window, size=settings.window_bytes, wake=_no_wake
        )
        self._in_flight = InFlightRequests(topics, self._accumulator)
        self._connection: TwistedConnection | None = None
        self._unanswered = 0
        self._write_scheduled = self._refreshing = False
        self._resumption: DelayedCall | None = None  # after a pause
        self._timeouts = LoopingCall(self._check_timeouts)
        self._timeouts.clock = reactor

    @property
    def idle(self) -> bool:
        """True where every request has its answer."""
        return self._accumulator.empty

    @property
    def connected(self) -> bool:
        """True while there is a connection."""
        return self._connection is not None

    def send(self, topic: str, message: Message, partition: int | None) -> Deferred[Receipt]:
        """Send a message whose topic is cached, and return its receipt.

        Raises Throttled where the window is full, and the errors of a send.
        """
        if self._unanswered >= self._settings.window:
            raise Throttled(
                f"{self._unanswered} messages wait for their receipts",
                hint="wait for some, or raise `window`",
            )
        # This thread drains the accumulator: it must not wait for room there.
        self._accumulator.draining_thread = get_ident()
        return self._deferred(self._accumulator.append(topic, message, partition, 0.0))

    def send_request(self, request: SideRequest[T]) -> Deferred[T]:
        """Send a request of another kind, again after a lost connection, and return its
        reply. A repetition must do no harm.
        """
        return self._deferred(self._accumulator.append_request(request))

    def _deferred(self, future: Future[T]) -> Deferred[T]:
        answer: Deferred[T] = Deferred()
        self._unanswered += 1

        def done(future: Future[T]) -> None:
            self._unanswered -= 1
            error = future.exception()
            if error is None:
                answer.callback(future.result())
            else:
                answer.errback(error)

        future.add_done_callback(done)
        self._schedule_write()
        if not self._timeouts.running:
            self._timeouts.start(CHECK_EVERY_S, now=False).addErrback(_log_failure)
        return answer

    def attach(self, connection: TwistedConnection) -> None:
        """Use a new connection."""
        self._connection = connection
        connection.on_drained = self._schedule_write
        connection.lost.addCallback(lambda _none: self._connection_lost(connection))
        self._schedule_write()

    def _connection_lost(self, connection: TwistedConnection) -> None:
        if self._connection is connection:
            self._connection = None
            self._in_flight.connection_lost()
            if self._failover_after is not None:
                self._in_flight.fail_unsent(time.monotonic())

    def receive(self, frames: Sequence[Frame]) -> None:
        """Handle the replies to this sender's requests."""
        self._in_flight.receive(frames)
        self._schedule_write()

    def _schedule_write(self) -> None:
        if not self._write_scheduled:
            self._write_scheduled = True
            self._reactor.callLater(0, self._write)

    def _write(self) -> None:
        """Write requests that may go out, about a mebibyte in one turn."""
        self._write_scheduled = False
        connection = self._connection
        if self._in_flight.stale_topics and not self._refreshing and connection is not None:
            self._refreshing = True
            Deferred.fromCoroutine(self._refresh_topics()).addErrback(_log_failure)
        if connection is None or connection.write_paused:
            return
        if not self._in_flight.awaits_replies:
            connection.last_received = self._reactor.seconds()  # silence counts from here
        connection.write(self._in_flight.next_writes(connection.conversation))
        if self._in_flight.has_more:
            self._schedule_write()
        elif (pause := self._in_flight.paused_s) and self._resumption is None:
            self._resumption = self._reactor.callLater(pause, self._resume)

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
            self._refreshing = False
        self._schedule_write()

    def _check_timeouts(self) -> None:
        """Detect a silent broker, and fail requests that have waited too long."""
        connection, now = self._connection, self._reactor.seconds()
        if (
            connection is not None
            and self._in_flight.awaits_replies
            and now - connection.last_received > self._settings.timeout
        ):
            connection.abort()
        if connection is None and self._failover_after is not None:
            self._in_flight.fail_unsent(time.monotonic() - self._failover_after)
        self._in_flight.expire(time.monotonic() - self._settings.delivery_timeout, "")
        if self._accumulator.empty:
            self._timeouts.stop()
        else:
            self._schedule_write()

    def close(self) -> Counter[str]:
        """Fail all requests without an answer; return the numbers of messages by
        topic.
        """
        self._accumulator.close()
        if self._timeouts.running:
            self._timeouts.stop()
        if self._resumption is not None:
            self._resumption.cancel()
            self._resumption = None
        return self._in_flight.fail_all(
            ClientClosed("the client was closed before the broker answered")
        )


def _no_wake() -> None:
    """The sender schedules a write after each append, so no thread sleeps."""


def _log_failure(failure: Failure) -> None:
    log.error("send.failed", error=failure.getErrorMessage(), traceback=failure.getTraceback())
