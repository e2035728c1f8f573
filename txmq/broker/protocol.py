"""The broker's end of a connection: bytes to requests, replies to bytes. What requests mean is in `requests` and `calls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from txmq import limits
from txmq.errors import ProtocolError, RequestRejected
from txmq.wire.frames import Frame, FrameDecoder, encode_frame
from txmq.wire.headers import Opcode
from txmq.wire.hello import Hello, Welcome, negotiate
from txmq.wire.status import reply_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IAddress, IReactorTime
    from twisted.internet.tcp import Connection

    from txmq.broker.core.state import Rejected

HELLO_SECONDS = 10  # a connection that has not said hello by then is closed
STUCK_SECONDS = 30  # a connection that does not read its replies for so long is cut (ARCHITECTURE 3)
UNSENT_BYTES = 8 << 20  # above it no more requests are read from the connection
log = structlog.get_logger()


class Session(Protocol):
    """One client connection. `reply` and `refuse` answer a request by its frame; late answers to a lost connection are dropped."""

    transport: Connection

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._decoder = FrameDecoder(limits.FRAME_BEFORE_HELLO)
        self._deadline: Any = None
        self.hello: Hello | None = None
        self.lost: list[Callable[[], None]] = []  # called when the connection is gone
        self.log = log.bind()

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(enabled=True)
        self.transport.registerProducer(_Brake(self), streaming=True)
        self.log = log.bind(peer=str(self.transport.getPeer()))
        self._deadline = self._dispatch.clock.callLater(HELLO_SECONDS, self._cut, "no hello")

    def dataReceived(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._receive(frame)
        except ProtocolError as error:
            self.log.warning("session.protocol_error", error=error.message)
            self.transport.write(encode_frame(Opcode.HELLO, 0, reply_for(error)[1], status=reply_for(error)[0]))
            self.transport.loseConnection()

    def _receive(self, frame: Frame) -> None:
        if self.hello is None:
            self._greet(frame)
        else:
            self._dispatch.handle(self, frame)

    def _greet(self, frame: Frame) -> None:
        hello = Hello.parse(frame)
        welcome = self._dispatch.welcome(negotiate(hello))
        self._deadline.cancel()
        self._deadline = None
        self.hello = hello
        self._decoder.limit = limits.FRAME
        self.log = self.log.bind(service=hello.service)
        self.reply(frame, welcome.encode())

    def reply(self, frame: Frame, payload: Sequence[bytes] | bytes = b"") -> None:
        """Answer a request."""
        if self.transport.connected:
            self.transport.write(encode_frame(frame.opcode, frame.correlation, payload))

    def refuse(self, frame: Frame, error: RequestRejected) -> None:
        """Answer a request with a no."""
        status, payload = reply_for(error)
        if self.transport.connected:
            self.transport.write(encode_frame(frame.opcode, frame.correlation, payload, status=status))

    def reject(self, frame: Frame, rejected: Rejected) -> None:
        """Answer a request with the core's no."""
        self.refuse(frame, rejected.error(rejected.message, hint=rejected.hint, detail=rejected.detail))

    def pause(self) -> None:
        """The client does not read: take no more requests from it, and cut it if it goes on."""
        self.transport.pauseProducing()
        if self._deadline is None:
            self._deadline = self._dispatch.clock.callLater(STUCK_SECONDS, self._cut, "does not read its replies")

    def resume(self) -> None:
        """The client has read what was waiting for it."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.transport.resumeProducing()

    def _cut(self, why: str) -> None:
        self._deadline = None
        self.log.warning("session.cut", reason=why)
        self.transport.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        del reason
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        for listener in self.lost:
            listener()
        self.lost.clear()
