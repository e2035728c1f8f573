"""Sends that no caller waits for one by one: a thread writes what the accumulator holds
and reads the receipts.

A lone message goes out at once. Under load each write takes all messages that came
during the previous one, in one batch for each partition. While requests are in flight,
new messages linger until they are half of all without a receipt. So two frames are in
flight, and the broker works on one while the next is made. Lingering ends with the last
receipt, or a millisecond later, and as soon as a caller observes a future. Callers may
send and receive themselves (`CallerIo`).
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, Thread, get_ident
from typing import TypeVar

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.connections.leader_search import LeaderSearch
from txmq.client.blocking.connections.stream import NonBlockingConnection
from txmq.client.blocking.sender.caller_io import CallerIo
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import Conversation, silent_for
from txmq.client.protocol.sender.accumulator import Accumulator, SideRequest
from txmq.client.protocol.sender.in_flight import InFlightRequests
from txmq.client.protocol.sender.multi_send import SenderStats
from txmq.client.protocol.sender.promise import Promise
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import (
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    StoreError,
    TxmqError,
    UnknownTopic,
)
from txmq.model.message import Message, Receipt
from txmq.wire.frames import Frame

CHECK_EVERY_S = 0.25  # for time-outs
LINGER_S = 0.001  # after the last receipt, for as many messages as are worth a frame
SLEEP_S = 0.005  # of the thread, while callers read
CONNECT_S = 1.0  # between checks for time-outs while no broker answers
T = TypeVar("T")
log = get_logger()


class Sender:
    """One connection and one producer session for all threads of a client.

    Its thread starts at the first use. `SpoolingSender` overrides the steps in which a
    spool takes part, such as `_claim_reads`.
    """

    def __init__(
        self,
        connect: Callable[[float], Connection],
        topics: TopicCache,
        *,
        window: int,
        window_bytes: int,
        attempt: float,
        timeout: float,
        delivery_timeout: float,
    ) -> None:
        """`connect` opens a connection before a deadline.

        Where a connection is silent for `attempt` seconds, other nodes are asked who
        leads; after `timeout` seconds it is lost. A message without a receipt after
        `delivery_timeout` seconds fails.
        """
        self._open, self._topics = connect, topics
        self._leader_search = LeaderSearch(connect)
        self._attempt, self._timeout = attempt, timeout
        self._delivery_timeout = delivery_timeout
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._wakes_only = selectors.DefaultSelector()
        self._wakes_only.register(self._wakes, selectors.EVENT_READ)
        self._accumulator = Accumulator(
            topics, messages=window, size=window_bytes, wake=self._on_ready
        )
        self._in_flight = InFlightRequests(topics, self._accumulator)
        self._caller_io = CallerIo(self._in_flight, self._accumulator, self._wake)
        promises = self._accumulator.promises
        promises.assist, promises.on_observed = self._caller_io.receive, self._caller_io.on_observed
        self._start_lock = Lock()
        self._thread: Thread | None = None
        self._close_deadline: float | None = None  # set by `close`
        self._checked_at = 0.0
        self._connection_error = ""
        self.failed_at_end: Counter[str] = Counter()  # messages by topic, known after `close`

    @property
    def stats(self) -> SenderStats:
        return self._in_flight.stats

    def send(
        self, topic: str, message: Message, partition: int | None, timeout: float
    ) -> Promise[Receipt]:
        """Send a message and return the future of its receipt. Raises as
        `Accumulator.append`.
        """
        future = self._accumulator.append(topic, message, partition, timeout)
        if self._thread is None:
            self._start()
        return future

    def request(self, request: SideRequest[T], timeout: float | None = None) -> Future[T]:
        """Send a request of another kind after all messages so far, and return the
        future of its reply.

        Bundles and decisions share frames. See `Accumulator.append_request`.
        """
        future = self._accumulator.append_request(request, timeout)
        if self._thread is None:
            self._start()
        return future

    def flush(self, timeout: float) -> bool:
        """Wait until every request has its answer, later ones included. Return False
        after `timeout` seconds.
        """
        return self._accumulator.flush(timeout)

    @property
    def idle(self) -> bool:
        """True where every request has its answer."""
        return self._accumulator.empty

    def close(self, timeout: float) -> None:
        """Refuse new messages, send pending ones for up to `timeout` seconds, and fail
        the rest.
        """
        self._accumulator.close()
        self._close_deadline = time.monotonic() + timeout
        self._wake()
        with self._start_lock:
            thread = self._thread
        if thread is not None and thread.ident != get_ident():
            thread.join(timeout + CONNECT_S + 1)
        elif thread is None:
            self._close_wakers()

    def discard_after_fork(self) -> None:
        """Drop everything in the child of a fork, which has the parent's sockets and no
        thread.
        """
        self._caller_io.connection = None
        self._close_wakers()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="txmq-pipeline", daemon=True)
                self._thread.start()

    def _on_ready(self) -> None:
        """Send on the caller's thread, which has just completed a frame, or wake the
        sender's thread.
        """
        # That thread must not sleep for long: it handles time-outs of what is in
        # flight.
        if not (
            (self._accumulator.lingering or not self._caller_io.thread_reads)
            and self._caller_io.send()
        ):
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread is awake; closed: nothing is left to do
            self._waker.send(b"\0")

    def _run(self) -> None:
        self._accumulator.draining_thread = get_ident()
        try:
            while not self._done():
                self._await_work()
                if connection := self._connect():
                    with connection, self._caller_io.io_lock:
                        self._converse(connection)
            self._finish()
        # Who waits is told before the log is, which may take long.
        except StoreError as error:  # of a spool: its disk has failed
            self._end(error)
            log.exception("pipeline.stopped", error=str(error))
        except BaseException:
            hint = "see the log, and make a new client"
            self._end(ClientClosed("the client's sender failed", hint=hint))
            log.exception("pipeline.failed")
            raise
        else:
            self._end(ClientClosed("the client was closed before the broker answered"))

    def _end(self, cause: TxmqError) -> None:
        self._accumulator.close(cause)
        self.failed_at_end = self._in_flight.fail_all(cause)
        self._leader_search.close()
        self._close_wakers()

    def _finish(self) -> None:
        """Do what is left to do before everything without an answer fails."""

    def _done(self) -> bool:
        return self._close_deadline is not None and (
            self._accumulator.empty or time.monotonic() >= self._close_deadline
        )

    def _await_work(self) -> None:
        """Sleep without a connection until there is something to send."""
        while (
            self._accumulator.empty
            and self._close_deadline is None
            and self._accumulator.sleep_if_idle(can_send=True)
        ):
            self._wakes_only.select()
            self._drain_wakes()

    def _connect(self) -> NonBlockingConnection | None:
        """Return a connection, or None after a second without one. Requests that have
        waited too long fail then.
        """
        deadline = time.monotonic() + CONNECT_S
        try:
            connection = NonBlockingConnection(self._leader_search.connection(deadline))
        except TxmqError as error:
            if not error.retriable:
                self._in_flight.fail_all(error)
            self._connection_error = error.message
            self._expire(time.monotonic())
            return None
        self._connection_error, self._caller_io.error = "", None
        self.stats.connections += 1
        return connection

    def _converse(self, connection: NonBlockingConnection) -> None:
        """Send and receive until the connection is lost, or all is done after
        `close`.
        """
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(connection.socket, selectors.EVENT_READ)
                selector.register(self._wakes, selectors.EVENT_READ)
                self._caller_io.last_received = self._checked_at = time.monotonic()
                while not self._done():
                    self._send(connection)
                    self._wait(selector, connection)
                    self._check_timeouts(connection)
        except (ConnectionLost, ProtocolError) as error:
            log.warning("pipeline.connection_lost", error=error.message)
        finally:
            self._in_flight.connection_lost()
            self._accumulator.stop_lingering()

    def _send(self, connection: NonBlockingConnection) -> None:
        if connection.unsent:
            connection.write()
            return
        if self._in_flight.stale_topics:
            self._refresh_topics()
        self._caller_io.write(connection)

    def _wait(self, selector: selectors.BaseSelector, connection: NonBlockingConnection) -> None:
        """Wait until the connection is readable, or writable with bytes left, and read.

        While callers read, only wait.
        """
        may_read = self._claim_reads()
        events = selectors.EVENT_READ * may_read | selectors.EVENT_WRITE * bool(connection.unsent)
        if events and selector.get_key(connection.socket).events != events:
            selector.modify(connection.socket, events)
        timeout = self._wait_timeout(connection)
        if not may_read:
            timeout = SLEEP_S if timeout is None else min(timeout, SLEEP_S)
        ready = self._select(selector if events else self._wakes_only, connection, timeout)
        if not ready and not self._in_flight.awaits_replies:
            self._accumulator.stop_lingering()
        if self._caller_io.error is not None:
            raise self._caller_io.error
        if self._in_flight.owes_work:
            self._in_flight.receive(())
        for key, mask in ready:
            if key.fileobj is self._wakes:
                self._drain_wakes()
            elif mask & selectors.EVENT_READ:
                self._caller_io.last_received = time.monotonic()
                self._receive(connection.read())

    def _claim_reads(self) -> bool:
        return self._caller_io.claim_reads()

    def _receive(self, replies: list[Frame]) -> None:
        self._in_flight.receive(replies)

    def _select(
        self,
        selector: selectors.BaseSelector,
        connection: NonBlockingConnection,
        timeout: float | None,
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            return selector.select(0)
        caller_io = self._caller_io
        caller_io.connection = connection
        caller_io.io_lock.release()
        try:
            return selector.select(timeout)
        finally:
            caller_io.io_lock.acquire()
            caller_io.connection = None

    def _wait_timeout(self, connection: NonBlockingConnection) -> float | None:
        in_flight = self._in_flight
        if connection.unsent:
            return CHECK_EVERY_S
        if in_flight.has_more or not self._accumulator.sleep_if_idle(can_send=in_flight.can_send):
            return 0
        if self._accumulator.lingering and not in_flight.awaits_replies:
            return LINGER_S
        pause = in_flight.paused_until - time.monotonic()
        if pause > 0:
            return min(pause, CHECK_EVERY_S)
        if in_flight.awaits_replies or in_flight.stale_topics or self._close_deadline is not None:
            return CHECK_EVERY_S
        return None

    def _check_timeouts(self, connection: NonBlockingConnection) -> None:
        """At intervals, detect a silent broker, and fail overdue requests."""
        now = time.monotonic()
        if now - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        if self._awaits_replies():
            self._doubt(connection.conversation, now - self._caller_io.last_received)
        self._expire(now)

    def _doubt(self, conversation: Conversation, silent_s: float) -> None:
        """Raise ConnectionLost where the broker has been silent for too long, or
        another node proves that it leads.
        """
        if silent_s > self._timeout:
            conversation.note_silence()
            raise silent_for(self._timeout)
        if silent_s > self._attempt:
            self._leader_search.ask(conversation, CHECK_EVERY_S)

    def _awaits_replies(self) -> bool:
        return self._in_flight.awaits_replies

    def _expire(self, now: float) -> None:
        self._in_flight.expire(now - self._delivery_timeout, self._connection_error)

    def _refresh_topics(self) -> None:
        """Refresh stale topics. Blocks this thread, because none of their messages may
        go out before.
        """
        for topic in sorted(self._in_flight.stale_topics):
            try:
                self._topics.refresh(topic)
            except UnknownTopic:
                self._topics.forget(topic)
            except TxmqError as error:
                self._connection_error = error.message
                self._in_flight.pause()
                return
            self._in_flight.stale_topics.discard(topic)

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            self._wakes.recv(4096)  # bytes that are left wake the thread again

    def _close_wakers(self) -> None:
        self._wakes_only.close()
        self._wakes.close()
        self._waker.close()
