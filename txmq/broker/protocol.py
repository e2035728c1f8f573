"""The broker's end of a connection: bytes to requests, replies to bytes. What requests
mean is in `requests` and `calls`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from zope.interface import implementer

from txmq.broker.reactor import file_limits
from txmq.errors import ProtocolError, TxmqError
from txmq.model import limits
from txmq.wire.frames import Frame, FrameDecoder, encode_frame, frame_pieces
from txmq.wire.headers import Opcode
from txmq.wire.hello import Hello, Welcome, negotiate
from txmq.wire.status import reply_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IAddress
    from twisted.python.failure import Failure

    from txmq.broker.reactor.protocols import Clock, Timer, Transport
    from txmq.core.state.state import Rejected

    Handle = Callable[["Session", Frame], None]

HELLO_SECONDS = 10  # a connection that has not said hello by then is closed
STUCK_SECONDS = (
    30  # a connection that does not read its replies for so long is cut (ARCHITECTURE 3)
)
RECEIVE_BYTES = (
    120 << 10
)  # Twisted's 64 KiB are not enough for 64 messages of 1 KiB; malloc maps 128 KiB each time
log = structlog.get_logger()


@dataclass(slots=True)
class Gathering:
    """While it is `on`, replies are kept back, to be sent by the flush that ends it:
    all of a session's at once.
    """

    on: bool = False
    sessions: dict[Session, None] = field(default_factory=dict)


class Session(Protocol):
    """One client connection. `reply` and `refuse` answer a request by its frame; late
    answers to a lost connection are dropped.
    """

    transport: Any  # Twisted's, without types

    def __init__(
        self, handle: Handle, welcome: Callable[[int], Welcome], clock: Clock, gathering: Gathering
    ) -> None:
        self._handle, self._welcome, self._clock, self._gathering = (
            handle,
            welcome,
            clock,
            gathering,
        )
        self._unsent: list[bytes] = []
        self._decoder = FrameDecoder(limits.FRAME_BEFORE_HELLO)
        self._deadline: Timer | None = None
        self._deaf = False
        self.hello: Hello | None = None
        self.instance: tuple[str, str] | None = (
            None  # service and name, where the client is an instance's process
        )
        self.incarnation = 0
        self.origin = b""  # the client's process, where it has told it
        self.lost: dict[
            object, Callable[[], None]
        ] = {}  # called when the connection is gone, by who wants to know
        self.log = log.bind()

    def connectionMade(self) -> None:
        self._wire: Transport = self.transport
        self._send: Callable[[bytes], object] | None = getattr(
            self.transport, "writeSomeData", None
        )  # not all can
        self._wire.setTcpNoDelay(True)
        self.transport.bufferSize = RECEIVE_BYTES
        # A client that does not read its replies is asked nothing more of, until it
        # does.
        self._wire.registerProducer(_Brake(self), streaming=True)
        self.log = log.bind(peer=str(self._wire.getPeer()))
        self._deadline = self._clock.callLater(HELLO_SECONDS, self._cut, "no hello")

    def dataReceived(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            for frame in self._decoder.feed(data):
                self._receive(frame)
        except ProtocolError as error:
            self.log.warning("session.protocol_error", error=error.message)
            status, payload = reply_for(error)
            self._wire.write(encode_frame(Opcode.HELLO, 0, payload, status=status))
            self._wire.loseConnection()

    def _receive(self, frame: Frame) -> None:
        if self.hello is None:
            self._greet(frame)
        else:
            self._handle(self, frame)

    def _greet(self, frame: Frame) -> None:
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
            self._put(frame_pieces(frame.opcode, frame.correlation, payload))

    def _put(self, pieces: Sequence[bytes]) -> None:
        if self._gathering.on:
            self._unsent += pieces
            self._gathering.sessions[self] = None
        else:
            self._wire.writeSequence(pieces)

    def flush(self) -> None:
        """Hand the kernel what was gathered, without waiting for the reactor's next
        turn; the reactor gets the rest.

        So it need not be told to look whether the socket takes something, and then not
        to look any more, which are two system calls. Not while the connection is being
        closed, nor before what it has: an error is for it to meet.
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
        return not (self.transport.dataBuffer or self.transport._tempDataBuffer)  # it has no other word

    def refuse(self, frame: Frame, error: TxmqError) -> None:
        """Answer a request with a no."""
        status, payload = reply_for(error)
        if self._wire.connected:
            self._put(frame_pieces(frame.opcode, frame.correlation, payload, status=status))

    def reject(self, frame: Frame, rejected: Rejected) -> None:
        """Answer a request with the core's no."""
        self.refuse(
            frame, rejected.error(rejected.message, hint=rejected.hint, detail=rejected.detail)
        )

    def pause(self) -> None:
        """The client does not read: take no more requests from it, and cut it if it
        goes on.
        """
        self._wire.pauseProducing()
        if self._deadline is None:
            self._deadline = self._clock.callLater(
                STUCK_SECONDS, self._cut, "does not read its replies"
            )

    def resume(self) -> None:
        """The client has read what was waiting for it."""
        self._cancel_deadline()
        self._wire.resumeProducing()

    def deafen(self) -> None:
        """Take no more requests. They are read all the same: what is left unread makes
        the kernel reset the connection, and the replies under way would be lost with
        it.
        """
        self._deaf = True

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
        lost, self.lost = self.lost, {}
        for listener in lost.values():
            listener()


@implementer(IPushProducer)
class _Brake:
    """What the transport calls when its send buffer is full, and when it is empty
    again.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def pauseProducing(self) -> None:
        self._session.pause()

    def resumeProducing(self) -> None:
        self._session.resume()

    def stopProducing(self) -> None:
        """The connection is over; `connectionLost` says so as well."""


class SessionFactory(Factory):
    """Makes sessions and knows them all."""

    noisy = False

    def __init__(
        self,
        handle: Handle,
        welcome: Callable[[int], Welcome],
        clock: Clock,
        room: Callable[[], int] = file_limits.room,
    ) -> None:
        """`room`: how many connections there may be at the moment; one more is closed
        as soon as it is there.
        """
        self._gathering = Gathering()
        self._make = partial(Session, handle, welcome, clock, self._gathering)
        self._room = room
        self._open: dict[Session, None] = {}
        self._full = False

    def buildProtocol(self, addr: IAddress | None) -> Session | None:
        full, self._full = self._full, len(self._open) >= self._room()
        if self._full:
            if not full:  # once: they try again and again
                hint = "raise the limit of open files (ulimit -n)"
                log.warning("connection.refused", peer=str(addr), open=len(self._open), hint=hint)
            return None
        return self.accept()

    def accept(self) -> Session:
        """A session for a connection that there is room for."""
        session = self._make()
        self._open[session] = None
        session.lost[self] = lambda: self._open.pop(session, None)
        return session

    @property
    def closed(self) -> bool:
        """Whether every connection is gone."""
        return not self._open

    def instances(self) -> set[tuple[str, str]]:
        """The producer instances (service, name) of which somebody is connected."""
        return {session.instance for session in self._open if session.instance is not None}

    def deafen(self) -> None:
        """Take no more requests from anybody."""
        for session in self._open:
            session.deafen()

    def gather(self) -> None:
        """Keep replies back until `flush`."""
        self._gathering.on = True

    def flush(self) -> None:
        """Send the replies given since `gather`, all of a session's at once. Saves a
        turn of the reactor.
        """
        sessions = list(self._gathering.sessions)
        self._gathering.sessions.clear()
        self._gathering.on = False
        for session in sessions:
            session.flush()

    def close(self) -> None:
        """Close every connection, what was written first."""
        for session in list(self._open):
            session.transport.loseConnection()
