"""The broker's side of a connection: bytes to requests, replies to bytes. `requests`
and `calls` carry the requests out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from zope.interface import implementer

from txmq.broker.reactor import process_limits
from txmq.errors import ProtocolError, TxmqError
from txmq.model import limits
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame, FrameDecoder, encode_frame, frame_buffers
from txmq.wire.hello import Hello, Welcome, negotiate
from txmq.wire.status import error_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IAddress
    from twisted.python.failure import Failure

    from txmq.broker.reactor.interfaces import Clock, Timer, Transport
    from txmq.core.events.outcome import Rejected

    Handle = Callable[["ClientSession", Frame], None]

HELLO_SECONDS = 10  # for a connection to send its hello
# a connection that does not read its replies for so long is cut
STUCK_SECONDS = 30
# Twisted's 64 KiB are not enough for 64 messages of 1 KiB; malloc maps 128 KiB each
# time
RECEIVE_BYTES = 120 << 10
log = structlog.get_logger()


@dataclass(slots=True)
class ReplyBuffer:
    """While it is `on`, sessions keep their replies. The flush that ends it sends each
    session's replies at once.
    """

    on: bool = False
    sessions: dict[ClientSession, None] = field(default_factory=dict)


class ClientSession(Protocol):
    """One client connection. `reply`, `refuse` and `reject` answer a request by its
    frame; answers to a lost connection are dropped.
    """

    transport: Any  # Twisted's, without types

    def __init__(
        self, handle: Handle, welcome: Callable[[int], Welcome], clock: Clock, buffer: ReplyBuffer
    ) -> None:
        self._handle, self._welcome, self._clock, self._buffer = handle, welcome, clock, buffer
        self._unsent: list[bytes] = []
        self._decoder = FrameDecoder(limits.FRAME_BEFORE_HELLO)
        self._deadline: Timer | None = None
        self._ignoring = False
        self.hello: Hello | None = None
        # service and name, where the client is an instance's process
        self.instance: tuple[str, str] | None = None
        self.incarnation = 0
        self.origin = b""  # the client's process, if its hello names one
        # called when the connection is gone, by the key of their owner
        self.on_lost: dict[object, Callable[[], None]] = {}
        self.log = log.bind()

    def connectionMade(self) -> None:
        self._wire: Transport = self.transport
        # not all can
        self._send: Callable[[bytes], object] | None = getattr(
            self.transport, "writeSomeData", None
        )
        self._wire.setTcpNoDelay(True)
        self.transport.bufferSize = RECEIVE_BYTES
        # No requests are read from a client that does not read its replies.
        self._wire.registerProducer(_Backpressure(self), streaming=True)
        self.log = log.bind(peer=str(self._wire.getPeer()))
        self._deadline = self._clock.callLater(HELLO_SECONDS, self._cut, "no hello")

    def dataReceived(self, data: bytes) -> None:
        if self._ignoring:
            return
        try:
            for frame in self._decoder.feed(data):
                self._receive(frame)
        except ProtocolError as error:
            self.log.warning("session.protocol_error", error=error.message)
            status, payload = error_reply(error)
            self._wire.write(encode_frame(Opcode.HELLO, 0, payload, status=status))
            self._wire.loseConnection()

    def _receive(self, frame: Frame) -> None:
        if self.hello is None:
            self._handle_hello(frame)
        else:
            self._handle(self, frame)

    def _handle_hello(self, frame: Frame) -> None:
        hello = Hello.parse(frame)
        welcome = self._welcome(negotiate(hello))
        self._cancel_deadline()
        self.hello = hello
        if hello.instance is not None and hello.service is not None:
            self.instance, self.incarnation = (hello.service, hello.instance), hello.incarnation
        self.origin = bytes.fromhex(hello.process or "")
        self._decoder.limit = limits.FRAME
        self.log = self.log.bind(service=hello.service)
        self.reply(frame, welcome.encode())

    def reply(self, frame: Frame, payload: Sequence[bytes] | bytes = b"") -> None:
        """Answer a request."""
        if self._wire.connected:
            self._put(frame_buffers(frame.opcode, frame.correlation, payload))

    def _put(self, pieces: Sequence[bytes]) -> None:
        if self._buffer.on:
            self._unsent += pieces
            self._buffer.sessions[self] = None
        else:
            self._wire.writeSequence(pieces)

    def flush_replies(self) -> None:
        """Write the buffered replies to the socket at once; the reactor sends what the
        socket does not take.

        This saves two system calls, which switch the reactor's interest in the socket
        on and off. A connection that is closing, or has unsent data, is left to the
        reactor, which handles its errors.
        """
        data, self._unsent = b"".join(self._unsent), []
        sent = None
        if (
            self._send is not None
            and self._wire.connected
            and not self._wire.disconnecting
            and self._is_drained()
        ):
            sent = self._send(data)
        if sent != len(data):
            self._wire.write(data[sent:] if isinstance(sent, int) else data)

    def _is_drained(self) -> bool:
        return not (
            self.transport.dataBuffer or self.transport._tempDataBuffer  # noqa: SLF001  # it has no other word
        )  # it has no other word

    def refuse(self, frame: Frame, error: TxmqError) -> None:
        """Answer a request with an error."""
        status, payload = error_reply(error)
        if self._wire.connected:
            self._put(frame_buffers(frame.opcode, frame.correlation, payload, status=status))

    def reject(self, frame: Frame, rejected: Rejected) -> None:
        """Answer a request with a refusal of the core."""
        self.refuse(
            frame, rejected.error(rejected.message, hint=rejected.hint, detail=rejected.detail)
        )

    def pause(self) -> None:
        """Stop reading from a client that does not read its replies; cut its connection
        if that lasts.
        """
        self._wire.pauseProducing()
        if self._deadline is None:
            self._deadline = self._clock.callLater(
                STUCK_SECONDS, self._cut, "does not read its replies"
            )

    def resume(self) -> None:
        """Read requests again: the client has read its replies."""
        self._cancel_deadline()
        self._wire.resumeProducing()

    def ignore_requests(self) -> None:
        """Read further requests without processing them.

        Unread bytes would make the kernel reset the connection, and replies under way
        would be lost.
        """
        self._ignoring = True

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut(self, why: str) -> None:
        self._deadline = None
        self.log.warning("session.cut", reason=why)
        self._wire.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        del reason
        self._cancel_deadline()
        lost, self.on_lost = self.on_lost, {}
        for listener in lost.values():
            listener()


@implementer(IPushProducer)
class _Backpressure:
    """The producer that the transport pauses when its send buffer is full."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    def pauseProducing(self) -> None:
        self._session.pause()

    def resumeProducing(self) -> None:
        self._session.resume()

    def stopProducing(self) -> None:
        """Do nothing: `connectionLost` is called as well."""


class SessionFactory(Factory):
    """Makes the sessions, and keeps the list of open ones."""

    noisy = False

    def __init__(
        self,
        handle: Handle,
        welcome: Callable[[int], Welcome],
        clock: Clock,
        connection_limit: Callable[[], int] = process_limits.connection_limit,
    ) -> None:
        """`connection_limit` returns the most connections there may be now. Further
        ones are closed at once.
        """
        self._buffer = ReplyBuffer()
        self._make = partial(ClientSession, handle, welcome, clock, self._buffer)
        self._connection_limit = connection_limit
        self._open: dict[ClientSession, None] = {}
        self._full = False

    def buildProtocol(self, addr: IAddress | None) -> ClientSession | None:
        full, self._full = self._full, len(self._open) >= self._connection_limit()
        if self._full:
            if not full:  # once: they try again and again
                hint = "raise the limit of open files (ulimit -n)"
                log.warning("connection.refused", peer=str(addr), open=len(self._open), hint=hint)
            return None
        return self.accept()

    def accept(self) -> ClientSession:
        """Return a session for a new connection within the limit."""
        session = self._make()
        self._open[session] = None
        session.on_lost[self] = lambda: self._open.pop(session, None)
        return session

    @property
    def all_closed(self) -> bool:
        """Return whether all connections are closed."""
        return not self._open

    def connected_instances(self) -> set[tuple[str, str]]:
        """Return the connected producer instances (service, name)."""
        return {session.instance for session in self._open if session.instance is not None}

    def ignore_requests(self) -> None:
        """Process no further requests of any client."""
        for session in self._open:
            session.ignore_requests()

    def buffer_replies(self) -> None:
        """Keep replies until `flush_replies`."""
        self._buffer.on = True

    def flush_replies(self) -> None:
        """Send the buffered replies, each session's at once. Saves a turn of the
        reactor.
        """
        sessions = list(self._buffer.sessions)
        self._buffer.sessions.clear()
        self._buffer.on = False
        for session in sessions:
            session.flush_replies()

    def close(self) -> None:
        """Close every connection after sending what is written."""
        for session in list(self._open):
            session.transport.loseConnection()
