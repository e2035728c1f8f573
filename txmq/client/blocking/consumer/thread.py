"""The thread behind a blocking consumer: one connection, on which a member's requests
go out and its answers come in.

It keeps the member alive while handlers work, fetches ahead, and survives lost
connections and restarts of the broker.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from math import inf
from threading import Condition, Thread

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.connections.stream import Stream
from txmq.client.log import get_logger
from txmq.client.protocol.consumer.member import Member, Phase
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.conversation import result
from txmq.errors import (
    ConnectionLost,
    LocalProtocolError,
    ProtocolError,
    RequestRejected,
    TxmqError,
)
from txmq.wire.frames import Frame

DIAL_S = 1.0  # of one attempt; between attempts the end of the consumer is looked for
PAUSE_S = 0.2  # between two connections of which the first came to nothing
LOOK_EVERY_S = 1.0  # at answers that do not come
log = get_logger()


class ConsumerThread:
    """`changed` guards the member; it is notified when messages or answers have
    come.
    """

    def __init__(
        self, member: Member, dial: Callable[[float], Connection], changed: Condition
    ) -> None:
        self._member, self._dial, self._changed = member, dial, changed
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._sleeps_until = 0.0  # while it is awake nobody need wake it
        self._abandoned = False
        self.trouble: TxmqError | OSError | None = None  # what keeps it from its group
        self._thread = Thread(target=self._run, name=f"txmq-{member.settings.group}", daemon=True)

    def start(self) -> None:
        """Begins to join."""
        self._thread.start()

    def poke(self) -> None:
        """Something may have to be sent sooner than the thread thinks. `changed` is
        held.
        """
        due = self._member.wake_at()
        if due is not None and due < self._sleeps_until:
            self.wake()

    def wake(self) -> None:
        """Lets the thread look at its member at once."""
        self._sleeps_until = 0.0
        with suppress(OSError):  # full of wakes, or over
            self._waker.send(b"!")

    def abandon(self) -> None:
        """Ends without a word to the broker; the session of the member will lapse."""
        self._abandoned = True
        self.wake()
        self._thread.join()

    @property
    def abandoned(self) -> bool:
        """Whether nothing will be said any more."""
        return self._abandoned

    @property
    def _over(self) -> bool:
        return (
            self._abandoned or self._member.phase is Phase.GONE or self._member.failure is not None
        )

    def _run(self) -> None:
        try:
            with closing(self._wakes), closing(self._waker):
                while not self._over:
                    self._connect()
        except BaseException as error:
            self._member.failure = LocalProtocolError(
                f"the consumer's thread has failed: {error!r}",
                hint="a bug of the client's: its log has the traceback",
            )
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def _connect(self) -> None:
        began = time.monotonic()
        try:
            with (
                Stream(self._dial(began + DIAL_S)) as stream,
                selectors.DefaultSelector() as selector,
            ):
                self._converse(stream, selector)
        except (TxmqError, OSError) as error:
            self._trouble(error, began)

    def _trouble(self, error: TxmqError | OSError, began: float) -> None:
        """Another connection may help, unless the error says that none will."""
        known, self.trouble = self.trouble, error
        with self._changed:
            self._member.lost(time.monotonic())
            if not isinstance(error, OSError | ProtocolError) and not error.retriable:
                self._member.failure = error
            over = self._over
        if over:
            return
        if known is None:
            log.warning(
                "consumer.disconnected", group=self._member.settings.group, error=str(error)
            )
        left = PAUSE_S - (time.monotonic() - began)
        if left > 0:
            time.sleep(left)

    def _converse(self, stream: Stream, selector: selectors.BaseSelector) -> None:
        """Until the member is gone. Raises ConnectionLost where another connection is
        needed.
        """
        selector.register(self._wakes, selectors.EVENT_READ)
        selector.register(stream.socket, selectors.EVENT_READ)
        waiting: dict[int, tuple[Request, float]] = {}
        with self._changed:
            self._member.connected(time.monotonic())
        while not self._over:
            now = time.monotonic()
            self._send(stream, waiting, now)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.unsent else 0)
            selector.modify(stream.socket, events)
            ready = {key.fileobj for key, _events in selector.select(self._patience(now))}
            self._sleeps_until = 0.0
            if self._wakes in ready:
                with suppress(BlockingIOError):
                    self._wakes.recv(4_096)
            if stream.socket in ready:
                stream.write()
                self._receive(stream.read(), waiting)
            _look(waiting)

    def _send(self, stream: Stream, waiting: dict[int, tuple[Request, float]], now: float) -> None:
        with self._changed:
            if self._member.wants_reconnect:
                raise ConnectionLost("the broker asks for a new beginning")
            requests = list(self._member.requests(now))
            due = self._member.wake_at()
            self._sleeps_until = inf if due is None else due
        for request in requests:
            correlation, pieces = stream.conversation.request(request.opcode, request.payload)
            waiting[correlation] = (request, now + request.patience_s)
            stream.write(pieces)

    def _patience(self, now: float) -> float:
        return max(0.0, min(self._sleeps_until - now, LOOK_EVERY_S))

    def _receive(self, frames: Iterable[Frame], waiting: dict[int, tuple[Request, float]]) -> None:
        with self._changed:
            now = time.monotonic()
            for frame in frames:
                request, _deadline = waiting.pop(frame.correlation)
                try:
                    payload = result(frame)
                except RequestRejected as error:
                    request.refused(error, now)
                else:
                    request.reply(payload, now)
            if self._member.phase is Phase.SERVING:
                self.trouble = None
            self._changed.notify_all()


def _look(waiting: dict[int, tuple[Request, float]]) -> None:
    now = time.monotonic()
    if any(deadline < now for _request, deadline in waiting.values()):
        raise ConnectionLost("the broker did not answer in time")
