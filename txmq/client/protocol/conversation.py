"""The client's side of a connection, without the connection: bytes in, replies out.
Both faces stand on it.

First the hello, and the registration of a producer instance that has none yet; after
the welcome, requests by their correlation, whose replies come in any order.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from txmq import __version__
from txmq.client.protocol.incarnation import Incarnation
from txmq.client.protocol.origin import origin
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    LogChanged,
    MessageTooLarge,
    RemoteProtocolError,
)
from txmq.model import limits
from txmq.wire.calls import encode_call
from txmq.wire.frames import Frame, FrameDecoder, frame_pieces
from txmq.wire.headers import Opcode
from txmq.wire.hello import VERSIONS, Hello, Limits, Welcome
from txmq.wire.json import parse
from txmq.wire.status import OK, to_error
from txmq.wire.together import Answer

CLIENT = f"txmq-python/{__version__} {platform.python_implementation()}/{platform.python_version()}"
CORRELATIONS = 1 << 32
LARGE = 1 << 15
Payload = bytes | Sequence[bytes]


class LogPin:
    """The log that a client's broker writes, known since the first welcome, or from the
    start.

    Repeated sends are told apart from new ones by that log alone, and offsets mean
    nothing in another: a client that meets another log at one of its addresses refuses
    it.
    """

    def __init__(self, log_id: UUID | None = None) -> None:
        self.log_id = log_id

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

    def __init__(
        self, service: str | None, pin: LogPin, incarnation: Incarnation | None = None
    ) -> None:
        self._service = service
        self._pin = pin
        self._incarnation = incarnation
        self._registering = False
        self._greeted: Welcome | None = None
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
        """What is to be sent first, in pieces.

        Raises BrokerUnavailable while another connection registers the instance that
        this client is.
        """
        one = self._incarnation
        if one is None:
            return self._hello(None, 0)
        if one.number:
            return self._hello(one.instance, one.number)
        if not one.claim():
            raise BrokerUnavailable(
                f"another connection is registering instance {one.instance!r}", hint="try again"
            )
        self._registering = True
        if one.number:  # while it was being claimed
            self.end()
            return self._hello(one.instance, one.number)
        hello, args = (
            self._hello(one.instance, 0),
            {"service": self._service, "instance": one.instance},
        )
        return [*hello, *self.request(Opcode.CALL, encode_call("producer.register", dict(args)))[1]]

    def _hello(self, instance: str | None, number: int) -> list[bytes]:
        hello = Hello(
            versions=VERSIONS,
            client=CLIENT,
            service=self._service,
            instance=instance,
            incarnation=number,
            process=origin() if self._service is not None else None,
        )
        return self.request(Opcode.HELLO, hello.encode())[1]

    def end(self) -> None:
        """The connection is over: if it was registering an instance, another may."""
        if self._registering and self._incarnation is not None:
            self._registering = False
            self._incarnation.release()

    def request(self, opcode: int, payload: Payload = b"") -> tuple[int, list[bytes]]:
        """The correlation of a request and its bytes, in pieces. MessageTooLarge where
        the broker would not take it.
        """
        self._last = correlation = (self._last + 1) % CORRELATIONS
        pieces = frame_pieces(opcode, correlation, payload)
        if self.welcome is not None:
            length, most = sum(map(len, pieces)), self.welcome.limits.frame
            if length > most:
                raise MessageTooLarge(
                    f"a frame of {length} bytes; the broker takes {most}", hint="send it in parts"
                )
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
        while self.welcome is None and frames:
            self._greet(frames.pop(0))
        return frames

    def _greet(self, frame: Frame) -> None:
        """The welcome, or the reply to the registration, which is part of the
        greeting.
        """
        if self._greeted is None:
            self._greeted = self._checked(Welcome.parse(frame))
            self._decoder.limit = limits.FRAME
        elif self._incarnation is not None:
            self._incarnation.number = int(returned(result(frame))["epoch"])
            self.end()
        if not self._registering:
            self.welcome = self._greeted

    def _checked(self, welcome: Welcome) -> Welcome:
        if not VERSIONS[0] <= welcome.version <= VERSIONS[1]:
            raise RemoteProtocolError(
                f"the broker chose version {welcome.version}, which this client does not speak"
            )
        self._pin.check(welcome)
        return welcome


def result(reply: Frame | Answer) -> bytes:
    """The payload of a reply, or of one of those in it. Raises the error that it tells
    of.
    """
    if reply.status != OK:
        raise to_error(reply.status, reply.payload)
    return reply.payload


def returned(payload: bytes) -> dict[str, Any]:
    """What a control call returned. Raises RemoteProtocolError where that is no
    object.
    """
    value = parse(payload)
    if not isinstance(value, dict):
        raise RemoteProtocolError("a control call that did not return an object")
    return value


def _unexpected(frame: Frame) -> Exception:
    """A broker that cannot even read a request answers with a refusal and closes the
    connection.
    """
    if frame.status != OK and frame.opcode == Opcode.HELLO:
        return to_error(frame.status, frame.payload)
    return RemoteProtocolError(
        f"a reply to a request that was not made: {frame.opcode}, {frame.correlation}"
    )
