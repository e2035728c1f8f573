"""The pipeline's connection, for whoever has something to send or waits for an answer
while its thread sleeps.

To wake another thread takes as long as the work itself. So the message that completes a
frame is sent by whoever puts it in, and who waits alone for an answer receives it, each
on his own thread. While somebody does, the pipeline's thread keeps off the connection,
and only looks now and then whether it is needed again.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

from txmq.client.blocking.connections.stream import Stream
from txmq.client.protocol.sender.accumulator import Accumulator
from txmq.client.protocol.sender.in_flight import Flights
from txmq.client.protocol.sender.promise import Promise
from txmq.errors import ConnectionLost, ProtocolError

SLICE_S = 0.25  # of a wait: then the connection may be another


class Line:
    """Who has `turn` sends and receives. It is the thread's own, but while that one
    sleeps with a `stream`.
    """

    def __init__(self, flights: Flights, outbox: Accumulator, wake: Callable[[], None]) -> None:
        self._flights, self._outbox, self._wake = flights, outbox, wake
        self._guard = outbox.guard
        self._waiter = Lock()
        self._lent = False
        self.listening = (
            False  # the thread receives: never two, or one would wait for what the other has read
        )
        self.turn = Lock()
        self.stream: Stream | None = None
        self.heard = 0.0  # when the broker was last known to be there
        self.trouble: ConnectionLost | ProtocolError | None = (
            None  # what a waiter met, for the thread to see to
        )

    def write(self, stream: Stream) -> None:
        """Sends what may go out. For who has the turn."""
        if not self._flights.awaits_replies:
            self.heard = time.monotonic()  # silence counts from here
        stream.write(self._flights.fill(stream.conversation))

    def listen(self) -> bool:
        """Whether the thread, which has the turn, shall receive: nobody else does, or
        did since this was asked.

        Unless somebody looks at a promise and waits for it otherwise.
        """
        lent, self._lent = self._lent, False
        self.listening = not self._waiter.locked() and (self._guard.watched > 0 or not lent)
        return self.listening

    def looked_at(self) -> None:
        """Somebody looks at a promise: what there is shall go out, and the thread
        receive.
        """
        self._outbox.hurry()
        if self.stream is not None and not (self.listening or self._waiter.locked()):
            self._wake()

    def send(self) -> bool:
        """Sends on the caller's thread, if that is all there is to do; whether it
        was.
        """
        stream = self.stream
        if stream is None or not self.turn.acquire(blocking=False):
            return False
        try:
            return self._sent(stream)
        finally:
            self.turn.release()

    def receive(self, promise: Promise[Any], timeout: float | None) -> None:
        """Sends and receives on the thread of who waits for the promise, until it is
        kept or the time is up.

        Or until something comes that is for the pipeline's thread to do, such as to
        call callbacks.
        """
        if self._guard.watched or not self._waiter.acquire(blocking=False):
            return
        self._lent = True
        try:
            ends = None if timeout is None else time.monotonic() + timeout
            self._outbox.ripen()
            while not promise.kept and self._go_on(ends):
                pass
        finally:
            self._waiter.release()
            if self._guard.watched or self._flights.left or self.trouble:
                self._wake()

    def _go_on(self, ends: float | None) -> bool:
        """Sends what there is, and receives once; whether to do it again."""
        left = SLICE_S if ends is None else min(SLICE_S, ends - time.monotonic())
        if left <= 0 or self._guard.watched or not self.turn.acquire(timeout=left):
            return False
        try:
            stream = self.stream
            if stream is None or self.listening or not self._sent(stream):
                return False
        finally:
            self.turn.release()
        ears = select.poll()
        ears.register(stream.socket, select.POLLIN)
        if not ears.poll(left * 1_000):
            return True
        with self.turn:
            return stream is self.stream and self._received(stream)

    def _sent(self, stream: Stream) -> bool:
        """Sends what there is; whether all of it went, so that who puts in more will
        see to that.
        """
        flights = self._flights
        try:
            while stream is self.stream and not (
                stream.unsent or flights.stale or flights.has_more
            ):
                if self._outbox.sleep(messages_too=flights.can_send):
                    return True
                self.write(stream)
        except ConnectionLost as error:
            self.trouble = error
        except (
            BaseException
        ):  # an interrupt: nobody knows how far it got, so that everything goes out again
            stream.abort()
            raise
        return False

    def _received(self, stream: Stream) -> bool:
        try:
            self.heard = time.monotonic()
            return self._flights.received_alone(stream.read())
        except (ConnectionLost, ProtocolError) as error:
            self.trouble = error
        except BaseException:  # as above
            stream.abort()
            raise
        return False
