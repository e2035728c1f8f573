"""Direct use of the sender's connection by callers, while the sender's thread sleeps.

To wake another thread takes as long as the work itself. So the caller whose message
completes a frame sends that frame, and a caller that waits alone for a receipt reads
it, each on its own thread. Meanwhile the sender's thread does not read. It only wakes
at intervals, to see whether it is needed again.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

from txmq.client.blocking.connections.stream import NonBlockingConnection
from txmq.client.protocol.sender.accumulator import Accumulator
from txmq.client.protocol.sender.in_flight import InFlightRequests
from txmq.client.protocol.sender.promise import Promise
from txmq.errors import ConnectionLost, ProtocolError

WAIT_S = 0.25  # of one poll; the connection may be another one afterwards


class CallerIo:
    """Sends and receives by the thread that has `io_lock`.

    The sender's thread has it, except while it sleeps with a `connection`.
    """

    def __init__(
        self, in_flight: InFlightRequests, accumulator: Accumulator, wake: Callable[[], None]
    ) -> None:
        self._in_flight, self._accumulator, self._wake = in_flight, accumulator, wake
        self._promises = accumulator.promises
        self._waiting_caller = Lock()  # locked by the caller that reads
        self._caller_has_read = False  # since the sender's thread asked last
        # Never two threads read: one would wait for bytes that the other has read.
        self.thread_reads = False
        self.io_lock = Lock()
        self.connection: NonBlockingConnection | None = None
        self.last_received = 0.0  # or the moment since which a reply is due
        # An error that a caller met, for the sender's thread to handle.
        self.error: ConnectionLost | ProtocolError | None = None

    def write(self, connection: NonBlockingConnection) -> None:
        """Write what may be sent. For the thread that has `io_lock`."""
        if not self._in_flight.awaits_replies:
            self.last_received = time.monotonic()  # silence counts from here
        connection.write(self._in_flight.next_writes(connection.conversation))

    def claim_reads(self) -> bool:
        """Let the sender's thread, which has `io_lock`, read, and return whether it
        may.

        It may not while a caller reads, or has read since the last question. An
        observed promise is an exception: its caller does not read.
        """
        has_read, self._caller_has_read = self._caller_has_read, False
        self.thread_reads = not self._waiting_caller.locked() and (
            self._promises.observed > 0 or not has_read
        )
        return self.thread_reads

    def on_observed(self) -> None:
        """Have pending messages sent, and replies read by the sender's thread."""
        self._accumulator.expedite()
        if self.connection is not None and not (self.thread_reads or self._waiting_caller.locked()):
            self._wake()

    def send(self) -> bool:
        """Send on the caller's thread, and return whether nothing is left to do."""
        connection = self.connection
        if connection is None or not self.io_lock.acquire(blocking=False):
            return False
        try:
            return self._send_ready(connection)
        finally:
            self.io_lock.release()

    def receive(self, promise: Promise[Any], timeout: float | None) -> None:
        """Send and receive on the thread of a caller that waits for the promise.

        This ends when the promise is resolved or the time is over, and also when work
        comes up for the sender's thread, such as callbacks.
        """
        if self._promises.observed or not self._waiting_caller.acquire(blocking=False):
            return
        self._caller_has_read = True
        try:
            deadline = None if timeout is None else time.monotonic() + timeout
            self._accumulator.expedite_silently()
            while not promise.resolved and self._exchange(deadline):
                pass
        finally:
            self._waiting_caller.release()
            if self._promises.observed or self._in_flight.owes_work or self.error:
                self._wake()

    def _exchange(self, deadline: float | None) -> bool:
        """Send what is ready, receive once, and return whether to continue."""
        left = WAIT_S if deadline is None else min(WAIT_S, deadline - time.monotonic())
        if left <= 0 or self._promises.observed or not self.io_lock.acquire(timeout=left):
            return False
        try:
            connection = self.connection
            if connection is None or self.thread_reads or not self._send_ready(connection):
                return False
        finally:
            self.io_lock.release()
        poll = select.poll()
        poll.register(connection.socket, select.POLLIN)
        if not poll.poll(left * 1_000):
            return True
        with self.io_lock:
            return connection is self.connection and self._read(connection)

    def _send_ready(self, connection: NonBlockingConnection) -> bool:
        """Send what is ready. Return True where all of it went, so that the next
        message wakes a thread.
        """
        in_flight = self._in_flight
        try:
            while connection is self.connection and not (
                connection.unsent or in_flight.stale_topics or in_flight.has_more
            ):
                if self._accumulator.sleep_if_idle(can_send=in_flight.can_send):
                    return True
                self.write(connection)
        except ConnectionLost as error:
            self.error = error
        except BaseException:
            # An interrupt: part of a frame may be sent, so everything goes out again on
            # another connection.
            connection.abort()
            raise
        return False

    def _read(self, connection: NonBlockingConnection) -> bool:
        try:
            self.last_received = time.monotonic()
            return self._in_flight.receive_for_caller(connection.read())
        except (ConnectionLost, ProtocolError) as error:
            self.error = error
        except BaseException:  # as above
            connection.abort()
            raise
        return False
