"""Sends that nobody waits for one by one: a thread of its own writes what has piled up
and brings receipts back.

A lone message goes out at once. Under load each write takes everything that came during
the previous one, one batch for each partition, and what comes while others are under
way gathers until it is half of all that have no receipt: so two frames are under way,
and the broker works on one while the next is made. That wait ends with the last
receipt, or a millisecond later, and as soon as somebody looks at a future. Whoever puts
in the message that completes the half sends it on his own thread, and who waits for a
receipt alone receives it himself (`Line`).
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, Thread, get_ident
from typing import TypeVar

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.connections.stream import Stream
from txmq.client.blocking.sender.caller_io import Line
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import Payload
from txmq.client.protocol.sender.accumulator import Accumulator
from txmq.client.protocol.sender.in_flight import Flights
from txmq.client.protocol.sender.promise import Promise
from txmq.client.protocol.sender.stats import Stats
from txmq.client.protocol.sender.topics import Topics
from txmq.errors import ClientClosed, ConnectionLost, ProtocolError, TxmqError, UnknownTopic
from txmq.model.message import Message, Receipt

LOOK_EVERY_S = 0.25  # at what takes too long
T = TypeVar("T")
EXPECT_S = 0.001  # after the last receipt, for as many messages as are worth a frame
NAP_S = 0.005  # of the thread, while others receive
DIAL_S = 1.0  # between looks at what takes too long while no broker answers
log = get_logger()


class Pipeline:
    """One connection and one producing session for all threads of a client; its thread
    starts at the first use.
    """

    def __init__(
        self,
        dial: Callable[[float], Connection],
        topics: Topics,
        *,
        window: int,
        window_bytes: int,
        timeout: float,
        patience: float,
    ) -> None:
        """A connection silent for `timeout` seconds is given up; a message without a
        receipt after `patience` fails.
        """
        self._dial, self._topics = dial, topics
        self._timeout, self._patience = timeout, patience
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._naps = selectors.DefaultSelector()  # hears nothing but wakes
        self._naps.register(self._wakes, selectors.EVENT_READ)
        self._outbox = Accumulator(topics, messages=window, size=window_bytes, wake=self._rouse)
        self._flights = Flights(topics, self._outbox)
        self._line = Line(self._flights, self._outbox, self._wake)
        self._outbox.guard.help, self._outbox.guard.looked_at = (
            self._line.receive,
            self._line.looked_at,
        )
        self._start = Lock()
        self._thread: Thread | None = None
        self._ends: float | None = None  # set by `close`: until then what is there may go out
        self._looked = 0.0
        self._trouble = ""

    @property
    def stats(self) -> Stats:
        """Counters, for the curious."""
        return self._flights.stats

    def send(
        self, topic: str, message: Message, partition: int | None, timeout: float
    ) -> Promise[Receipt]:
        """Puts a message in and returns the future of its receipt. Raises as
        `Outbox.put` does.
        """
        future = self._outbox.put(topic, message, partition, timeout)
        if self._thread is None:
            self._begin()
        return future

    def submit(
        self,
        opcode: int,
        payload: Payload = b"",
        decode: Callable[[bytes], T] = bytes,  # type: ignore[assignment]  # as of Outbox.carry
        rebuild: Callable[[], bytes] | None = None,
        timeout: float | None = None,
    ) -> Future[T]:
        """Sends a request of any kind behind what is there, for the future of its
        reply: see `Outbox.carry`.

        It is made again after a lost connection, so it must be one that does no harm
        twice: a decision, an ack, a group. Groups and decisions share frames with
        others.
        """
        future = self._outbox.carry(opcode, payload, decode, rebuild, timeout)
        if self._thread is None:
            self._begin()
        return future

    def flush(self, timeout: float) -> bool:
        """Waits until everything put in so far, and since, has its answer; whether it
        has.
        """
        return self._outbox.flush(timeout)

    def close(self, timeout: float) -> None:
        """Takes nothing more in, lets what is there go out for up to `timeout` seconds,
        fails the rest.
        """
        self._outbox.close()
        self._ends = time.monotonic() + timeout
        self._wake()
        with self._start:
            thread = self._thread
        if thread is not None and thread.ident != get_ident():
            thread.join(timeout + DIAL_S + 1)
        elif thread is None:
            self._close_wakers()

    def abandon(self) -> None:
        """In the child of a fork: the thread is not here, and the sockets are the
        parent's.
        """
        self._line.stream = None
        self._close_wakers()

    def _begin(self) -> None:
        with self._start:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="txmq-pipeline", daemon=True)
                self._thread.start()

    def _rouse(self) -> None:
        """Called by the outbox: the thread sleeps, and there is something to send."""
        # Not where the thread might sleep for long: it has to see to what is under way.
        if not ((self._outbox.expectant or not self._line.listening) and self._line.send()):
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake; closed: nothing is left to do
            self._waker.send(b"\0")

    def _run(self) -> None:
        self._outbox.reader = get_ident()
        trouble = ClientClosed("the client was closed before the broker answered")
        try:
            while not self._done():
                self._await_work()
                if stream := self._connect():
                    with stream, self._line.turn:
                        self._converse(stream)
        except BaseException:
            log.exception("pipeline.failed")
            trouble = ClientClosed(
                "the client's pipeline failed", hint="the log says why; make a new client"
            )
            raise
        finally:
            self._outbox.close()
            self._flights.give_up(trouble)
            self._close_wakers()

    def _done(self) -> bool:
        return self._ends is not None and (self._outbox.empty or time.monotonic() >= self._ends)

    def _await_work(self) -> None:
        """Without a connection, nothing is done until something is to be sent."""
        while self._outbox.empty and self._ends is None and self._outbox.sleep(messages_too=True):
            self._naps.select()
            self._hear_wakes()

    def _connect(self) -> Stream | None:
        """A connection, or None after a while without one; what has waited too long
        fails meanwhile.
        """
        try:
            stream = Stream(self._dial(time.monotonic() + DIAL_S))
        except TxmqError as error:
            if not error.retriable:
                self._flights.give_up(error)
            self._trouble = error.message
            self._flights.expire(time.monotonic() - self._patience, self._trouble)
            return None
        self._trouble, self._line.trouble = "", None
        self.stats.connections += 1
        return stream

    def _converse(self, stream: Stream) -> None:
        """Sends and receives until the connection is lost, or all is done after
        `close`.
        """
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(stream.socket, selectors.EVENT_READ)
                selector.register(self._wakes, selectors.EVENT_READ)
                self._line.heard = self._looked = time.monotonic()
                while not self._done():
                    self._send(stream)
                    self._wait(selector, stream)
                    self._look()
        except (ConnectionLost, ProtocolError) as error:
            log.warning("pipeline.connection_lost", error=error.message)
        finally:
            self._flights.lost()
            self._outbox.expect_no_more()

    def _send(self, stream: Stream) -> None:
        if stream.unsent:
            stream.write()
            return
        if self._flights.stale:
            self._refresh()
        self._line.write(stream)

    def _wait(self, selector: selectors.BaseSelector, stream: Stream) -> None:
        """Until there is something to read, or to write and room for it; then reads.
        Not while others receive.
        """
        listen = self._line.listen()
        wanted = selectors.EVENT_READ * listen | selectors.EVENT_WRITE * stream.unsent
        if wanted and selector.get_key(stream.socket).events != wanted:
            selector.modify(stream.socket, wanted)
        longest = self._longest_wait(stream)
        if not listen:
            longest = NAP_S if longest is None else min(longest, NAP_S)
        ready = self._select(selector if wanted else self._naps, stream, longest)
        if not ready and not self._flights.awaits_replies:
            self._outbox.expect_no_more()
        if self._line.trouble is not None:
            raise self._line.trouble
        if self._flights.left:
            self._flights.received(())
        for key, events in ready:
            if key.fileobj is self._wakes:
                self._hear_wakes()
            elif events & selectors.EVENT_READ:
                self._line.heard = time.monotonic()
                self._flights.received(stream.read())

    def _select(
        self, selector: selectors.BaseSelector, stream: Stream, longest: float | None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if longest == 0:
            return selector.select(0)
        line = self._line
        line.stream = stream
        line.turn.release()
        try:
            return selector.select(longest)
        finally:
            line.turn.acquire()
            line.stream = None

    def _longest_wait(self, stream: Stream) -> float | None:
        flights = self._flights
        if stream.unsent:
            return LOOK_EVERY_S
        if flights.has_more or not self._outbox.sleep(messages_too=flights.can_send):
            return 0
        if self._outbox.expectant and not flights.awaits_replies:
            return EXPECT_S
        pause = flights.paused_until - time.monotonic()
        if pause > 0:
            return min(pause, LOOK_EVERY_S)
        return (
            LOOK_EVERY_S
            if flights.awaits_replies or flights.stale or self._ends is not None
            else None
        )

    def _look(self) -> None:
        """Now and then, looks for a peer that has gone silent and for what has waited
        too long.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        if self._flights.awaits_replies and now - self._line.heard > self._timeout:
            raise ConnectionLost(f"the broker has not answered for {self._timeout} s")
        self._flights.expire(now - self._patience, self._trouble)

    def _refresh(self) -> None:
        """Topics have grown. Asked for on this thread, because nothing of theirs may go
        out before it is known.
        """
        for topic in sorted(self._flights.stale):
            try:
                self._topics.refresh(topic)
            except UnknownTopic:
                self._topics.forget(topic)
            except TxmqError as error:
                self._trouble = error.message
                self._flights.pause()
                return
            self._flights.stale.discard(topic)

    def _hear_wakes(self) -> None:
        with suppress(BlockingIOError):
            self._wakes.recv(4096)  # what is left, if ever, wakes again

    def _close_wakers(self) -> None:
        self._naps.close()
        self._wakes.close()
        self._waker.close()
