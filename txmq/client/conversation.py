"""The client's side of a connection, without the connection: bytes in, replies out. Both faces stand on it.

First the hello; after the welcome, requests by their correlation, whose replies come in any order.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from txmq import __version__, limits
from txmq.errors import ConnectionLost, LogChanged, MessageTooLarge, RemoteProtocolError
from txmq.wire.frames import Frame, FrameDecoder, frame_pieces
from txmq.wire.headers import Opcode
from txmq.wire.hello import VERSIONS, Hello, Limits, Welcome
from txmq.wire.json import parse
from txmq.wire.status import OK, to_error

CLIENT = f"txmq-python/{__version__} {platform.python_implementation()}/{platform.python_version()}"
CORRELATIONS = 1 << 32
LARGE = 1 << 15
Payload = bytes | Sequence[bytes]


class LogPin:
    """The log that a client's broker writes, known since the first welcome.

    Repeated sends are told apart from new ones by that log alone, and offsets mean nothing in another: a client that
    meets another log at one of its addresses refuses it.
    """

    def __init__(self) -> None:
        self.log_id: UUID | None = None

    def check(self, welcome: Welcome) -> None:
        """Remembers the first log. Raises LogChanged for every other."""
        if self.log_id is None:
            self.log_id = welcome.log_id
        if welcome.log_id != self.log_id:
            raise LogChanged(
                f"broker {welcome.broker} has log {welcome.log_id}, not {self.log_id} as before",
                hint="its data directory was replaced: find out why, then make a new client",
            )


class Conversation:
    """One connection's conversation. After a ProtocolError it is of no more use."""

    def __init__(self, service: str | None, pin: LogPin) -> None:
        self._service = service
        self._pin = pin
        self._decoder = FrameDecoder(limits.FRAME_BEFORE_HELLO)
        self._expected: dict[int, int] = {}
        self._last = 0
        self.welcome: Welcome | None = None

    @property
    def limits(self) -> Limits:
        """What the broker takes at most. ConnectionLost before it has told."""
        if self.welcome is None:
            raise ConnectionLost("the broker has not answered the hello")
        return self.welcome.limits

    @property
    def in_large_reply(self) -> bool:
        """Whether more of a reply is to come than one ordinary read brings."""
        return self._decoder.pending >= LARGE

    def hello(self) -> list[bytes]:
        """The first request, in pieces."""
        hello = Hello(versions=VERSIONS, client=CLIENT, service=self._service)
        return self.request(Opcode.HELLO, hello.encode())[1]

    def request(self, opcode: int, payload: Payload = b"") -> tuple[int, list[bytes]]:
        """The correlation of a request and its bytes, in pieces. MessageTooLarge where the broker would not take it."""
        self._last = correlation = (self._last + 1) % CORRELATIONS
        pieces = frame_pieces(opcode, correlation, payload)
        if self.welcome is not None:
            length, most = sum(map(len, pieces)), self.welcome.limits.frame
            if length > most:
                raise MessageTooLarge(f"a frame of {length} bytes; the broker takes {most}", hint="send it in parts")
        self._expected[correlation] = opcode
        return correlation, pieces

    def receive(self, data: bytes) -> list[Frame]:
        """The replies that `data` completes; the welcome is kept here.

        Raises RemoteProtocolError, LogChanged, or why the broker refused the hello.
        """
        frames = self._decoder.feed(data)
        for frame in frames:
            if self._expected.pop(frame.correlation, None) != frame.opcode:
                raise _unexpected(frame)
        if self.welcome is None and frames:
            self._greet(frames.pop(0))
        return frames

    def _greet(self, frame: Frame) -> None:
        welcome = Welcome.parse(frame)
        if not VERSIONS[0] <= welcome.version <= VERSIONS[1]:
            raise RemoteProtocolError(f"the broker chose version {welcome.version}, which this client does not speak")
        self._pin.check(welcome)
        self._decoder.limit = limits.FRAME
        self.welcome = welcome


def result(reply: Frame) -> bytes:
    """The payload of a reply. Raises the error that it tells of."""
    if reply.status != OK:
        raise to_error(reply.status, reply.payload)
    return reply.payload


def returned(payload: bytes) -> dict[str, Any]:
    """What a control call returned. Raises RemoteProtocolError where that is no object."""
    value = parse(payload)
    if not isinstance(value, dict):
        raise RemoteProtocolError("a control call that did not return an object")
    return value


def _unexpected(frame: Frame) -> Exception:
    """A broker that cannot even read a request answers with a refusal and closes the connection."""
    if frame.status != OK and frame.opcode == Opcode.HELLO:
        return to_error(frame.status, frame.payload)
    return RemoteProtocolError(f"a reply to a request that was not made: {frame.opcode}, {frame.correlation}")
