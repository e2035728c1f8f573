"""The thread of a blocking consumer's member, and its connection.

It keeps the member alive while handlers work, fetches ahead, and survives lost
connections and restarts of the broker.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from math import inf
from threading import Condition, Thread

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.connections.leader_search import LeaderSearch
from txmq.client.blocking.connections.stream import NonBlockingConnection
from txmq.client.log import get_logger
from txmq.client.protocol.consumer.member import Member, MemberPhase
from txmq.client.protocol.consumer.requests import DOUBT_S, REPLY_S, Request
from txmq.client.protocol.conversation import Conversation, reply_payload
from txmq.errors import (
    ConnectionLost,
    LocalProtocolError,
    ProtocolError,
    RequestRejected,
    TxmqError,
)
from txmq.wire.frames import Frame
from txmq.wire.status import OK

CONNECT_S = 1.0  # for one attempt; a consumer that is abandoned ends after it
RECONNECT_S = 0.2  # at least, between two attempts
CHECK_EVERY_S = 1.0  # for replies that are overdue
log = get_logger()


class MemberThread:
    """A thread that drives a member.

    `changed` guards the member; it is notified of new messages and answers. `trouble`
    is the error that keeps the member from its group for now.
    """

    def __init__(
        self, member: Member, connect: Callable[[float], Connection], changed: Condition
    ) -> None:
        self._member, self._changed = member, changed
        self._leader_search = LeaderSearch(connect)
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._sleeps_until = 0.0  # zero while it is awake: then no wake-up is needed
        self._abandoned = False
        self.trouble: TxmqError | OSError | None = None
        self._is_loss_logged = False  # since the member was last in its group
        self._thread = Thread(target=self._run, name=f"txmq-{member.settings.group}", daemon=True)

    def start(self) -> None:
        """Begin to join the group."""
        self._thread.start()

    def poke(self) -> None:
        """Wake the thread if a request is due before it would wake. `changed` is
        held.
        """
        due = self._member.wake_at()
        if due is not None and due < self._sleeps_until:
            self.wake()

    def wake(self) -> None:
        """Wake the thread."""
        self._sleeps_until = 0.0
        with suppress(OSError):  # the pipe is full of wake-ups, or closed
            self._waker.send(b"!")

    def abandon(self) -> None:
        """End without a request to the broker; the member's session will lapse."""
        self._abandoned = True
        self.wake()
        self._thread.join()

    def forget_after_fork(self) -> None:
        """Do nothing more in the child of a fork, where the thread is none."""
        self._abandoned = True
        self._sleeps_until = 0.0  # so that nobody wakes the parent's

    @property
    def abandoned(self) -> bool:
        """True once the thread has been ended."""
        return self._abandoned

    @property
    def _over(self) -> bool:
        return (
            self._abandoned
            or self._member.phase is MemberPhase.GONE
            or self._member.failure is not None
        )

    def _run(self) -> None:
        try:
            with closing(self._wakes), closing(self._waker), closing(self._leader_search):
                while not self._over:
                    self._serve_connection()
        except BaseException as error:
            self._member.failure = LocalProtocolError(
                f"the consumer's thread has failed: {error!r}",
                hint="this is a bug of the client; the program's standard error has the traceback",
            )
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def _serve_connection(self) -> None:
        began = time.monotonic()
        try:
            with (
                NonBlockingConnection(
                    self._leader_search.connection(began + CONNECT_S)
                ) as connection,
                selectors.DefaultSelector() as selector,
            ):
                self._serve(connection, selector)
        except (TxmqError, OSError) as error:
            self._on_error(error, began)

    def _on_error(self, error: TxmqError | OSError, began: float) -> None:
        """Let another connection try, unless the error is final."""
        self.trouble = error
        with self._changed:
            # Then the member has logged why. An attempt that fails later is a loss.
            is_asked_for = self._member.needs_reconnect and self._member.is_connected
            self._member.disconnected(time.monotonic())
            if not isinstance(error, OSError | ProtocolError) and not error.retriable:
                self._member.failure = error
            over = self._over
        if over:
            return
        if not (is_asked_for or self._is_loss_logged):
            self._is_loss_logged = True
            log.warning(
                "consumer.disconnected", group=self._member.settings.group, error=str(error)
            )
        left = RECONNECT_S - (time.monotonic() - began)
        if left > 0:
            time.sleep(left)

    def _serve(self, connection: NonBlockingConnection, selector: selectors.BaseSelector) -> None:
        """Send and receive until the member is gone. Raises ConnectionLost where
        another connection is needed.
        """
        selector.register(self._wakes, selectors.EVENT_READ)
        selector.register(connection.socket, selectors.EVENT_READ)
        in_flight: dict[int, tuple[Request, float]] = {}
        heard_at = time.monotonic()
        with self._changed:
            self._member.connected(heard_at)
        while not self._over:
            now = time.monotonic()
            self._send(connection, in_flight, now)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            selector.modify(connection.socket, events)
            timeout = max(0.0, min(self._sleeps_until - now, CHECK_EVERY_S))
            ready = {key.fileobj: mask for key, mask in selector.select(timeout)}
            self._sleeps_until = 0.0
            if self._wakes in ready:
                with suppress(BlockingIOError):
                    self._wakes.recv(4_096)
            if connection.socket in ready:
                if connection.unsent:
                    connection.write()
                if ready[connection.socket] & selectors.EVENT_READ:
                    heard_at = time.monotonic()
                self._receive(connection.read(), in_flight)
            self._check_overdue(connection.conversation, in_flight, heard_at)

    def _send(
        self,
        connection: NonBlockingConnection,
        in_flight: dict[int, tuple[Request, float]],
        now: float,
    ) -> None:
        with self._changed:
            if self._member.needs_reconnect:
                raise ConnectionLost("the member has to join its group again")
            requests = self._member.requests(now)
            due = self._member.wake_at()
            self._sleeps_until = inf if due is None else due
        for request in requests:
            correlation, pieces = connection.conversation.request(request.opcode, request.payload)
            in_flight[correlation] = (request, now + request.timeout_s)
            connection.write(pieces)

    def _receive(
        self, frames: Sequence[Frame], in_flight: dict[int, tuple[Request, float]]
    ) -> None:
        if not frames:  # a part of a large reply, for which nobody need wake up
            return
        with self._changed:
            now = time.monotonic()
            for frame in frames:
                request, _deadline = in_flight.pop(frame.correlation)
                try:
                    payload = frame.payload if frame.status == OK else reply_payload(frame)
                except RequestRejected as error:
                    request.refused(error, now)
                else:
                    request.reply(payload, now)
            if self._member.phase is MemberPhase.SERVING:
                self.trouble, self._is_loss_logged = None, False
            self._changed.notify_all()

    def _check_overdue(
        self,
        conversation: Conversation,
        in_flight: dict[int, tuple[Request, float]],
        heard_at: float,
    ) -> None:
        """Raise ConnectionLost where a reply is overdue, or another node proves that it
        leads while one is due for long and nothing is heard.
        """
        now, due = time.monotonic(), min((due for _request, due in in_flight.values()), default=inf)
        if due < now:
            conversation.note_silence()
            raise ConnectionLost("the broker did not answer in time")
        if max(due, heard_at + REPLY_S) - DOUBT_S < now:
            self._leader_search.ask(conversation, CONNECT_S)
