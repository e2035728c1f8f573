"""One blocking connection: a request goes out and its reply comes back on the caller's
own thread.

Time-outs are the kernel's (SO_RCVTIMEO): Python's own would cost one more system call
for each receive. After a time-out, a lost connection or a broken protocol the
connection is closed: a late reply must not meet a later request.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from txmq.client.protocol.address import Address
from txmq.client.protocol.conversation import Conversation, Payload, result, returned
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    RequestTimeout,
    TxmqError,
)
from txmq.wire.calls import encode_call
from txmq.wire.frames import Frame
from txmq.wire.headers import Opcode
from txmq.wire.hello import Limits, Welcome

TIMEVAL = struct.Struct("ll")
READ_BYTES = 1 << 16  # of one receive; below what malloc would map and unmap each time
LARGE_READ_BYTES = 1 << 20  # while a large reply is under way
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5  # between rounds of attempts to connect
PIECES_AT_ONCE = 512  # the kernel takes at most 1024 buffers in one call


class Connection:
    """A connection that was welcomed. For one thread at a time."""

    def __init__(self, sock: socket.socket, conversation: Conversation, address: Address) -> None:
        self.socket = sock
        self.conversation = conversation
        self.address = address
        self.closed = False
        self._timeout = -1.0
        self._replies: dict[int, Frame] = {}
        self._aside: dict[int, Callable[[Frame], None]] = {}

    @property
    def welcome(self) -> Welcome:
        """What the broker said of itself."""
        assert self.conversation.welcome is not None, "only welcomed connections are handed out"
        return self.conversation.welcome

    @property
    def limits(self) -> Limits:
        """What the broker takes at most, in bytes."""
        return self.conversation.limits

    def request(self, opcode: int, payload: Payload = b"", *, timeout: float) -> bytes:
        """The payload of the reply, within `timeout` seconds.

        Raises ConnectionLost or RequestTimeout where the request may have been carried
        out, RequestRejected where the broker refused it.
        """
        deadline = time.monotonic() + timeout
        return self.read(self.write(opcode, payload, deadline), deadline)

    def call(
        self, name: str, args: dict[str, Any] | None = None, *, timeout: float
    ) -> dict[str, Any]:
        """What a control call returns. Raises as `request` does."""
        return returned(self.request(Opcode.CALL, encode_call(name, args or {}), timeout=timeout))

    def write(self, opcode: int, payload: Payload, deadline: float) -> int:
        """Sends a request and returns its correlation, for `read`. Several may be under
        way.
        """
        correlation, pieces = self.conversation.request(opcode, payload)
        self._send(pieces, deadline)
        return correlation

    def read(self, correlation: int, deadline: float) -> bytes:
        """The payload of the reply to that request; replies to others are kept."""
        while correlation not in self._replies:
            self._sort(self.receive(deadline))
        return result(self._replies.pop(correlation))

    def write_aside(
        self, opcode: int, payload: Payload, heard: Callable[[Frame], None]
    ) -> int | None:
        """Sends a request whose reply `heard` gets when somebody reads it on the way to
        another one.

        Returns its correlation. Never waits: None = it did not go out, and the
        connection is closed.
        """
        correlation, pieces = self.conversation.request(opcode, payload)
        self._aside[correlation] = heard
        try:
            if self.socket.sendmsg(pieces, (), socket.MSG_DONTWAIT) == sum(map(len, pieces)):
                return correlation
        except OSError:
            pass
        except BaseException:
            self.close()
            raise
        self.close()
        return None

    def await_aside(self, correlation: int, deadline: float) -> None:
        """Reads until the reply to that request was heard. Raises as `read` does."""
        while correlation in self._aside:
            self._sort(self.receive(deadline))

    def catch_up(self) -> None:
        """Takes the replies that have come; the connection is closed where that shows
        that it is of no more use.
        """
        try:
            data = self.socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            if data:
                self._sort(self.conversation.receive(data))
                return
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            pass
        self.close()

    def _sort(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            heard = self._aside.pop(frame.correlation, None)
            if heard is None:
                self._replies[frame.correlation] = frame
            else:
                heard(frame)

    def receive(self, deadline: float) -> list[Frame]:
        """The replies, if any, that the next bytes complete; for those who have several
        requests under way.
        """
        self._bound(deadline)
        try:
            data = self.socket.recv(
                LARGE_READ_BYTES if self.conversation.in_large_reply else READ_BYTES
            )
            if data:
                return self.conversation.receive(data)
        except OSError as error:
            raise self._lost(error) from error
        except ProtocolError as error:
            self.close()
            error.outcome = "unknown"  # of whatever was under way
            raise
        except BaseException:  # a signal: the reply to come would meet a later request
            self.close()
            raise
        raise self._lost(None)

    def greet(self, deadline: float) -> None:
        """Says hello and waits for the welcome. Raises as `request` and
        `Conversation.receive` do.
        """
        self._send(self.conversation.hello(), deadline)
        while self.conversation.welcome is None:
            self.receive(deadline)

    def is_stale(self) -> bool:
        """Whether the peer has closed an idle connection, or sent what nobody asked
        for.
        """
        if self._aside:
            self.catch_up()
            return self.closed
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Closes the connection; what is under way has an unknown outcome."""
        self.closed = True
        self.conversation.end()
        self.socket.close()

    def abort(self) -> None:
        """Ends the connection from another thread: whoever waits for a reply gets
        ClientClosed.
        """
        self.closed = True
        with suppress(OSError):  # lost already
            self.socket.shutdown(socket.SHUT_RDWR)

    def _send(self, pieces: Sequence[bytes], deadline: float) -> None:
        self._bound(deadline)
        try:
            sent = self.socket.sendmsg(pieces[:PIECES_AT_ONCE])
            if sent < sum(map(len, pieces)):
                self._send_rest(b"".join(pieces)[sent:], deadline)
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self.close()
            raise

    def _send_rest(self, rest: bytes, deadline: float) -> None:
        view = memoryview(rest)
        while view:
            self._bound(deadline)
            view = view[self.socket.send(view) :]

    def _bound(self, deadline: float) -> None:
        """Sets the kernel's time-outs for the next step, where they differ by enough to
        matter.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._lost(TimeoutError())
        if not left <= self._timeout <= 1.1 * left:
            self._timeout = 1.02 * left
            seconds = int(self._timeout)
            value = TIMEVAL.pack(seconds, max(1, int((self._timeout - seconds) * 1e6)))
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _lost(self, error: OSError | None) -> ConnectionLost | RequestTimeout | ClientClosed:
        if self.closed:
            return ClientClosed("the connection was closed by another thread")
        self.close()
        if isinstance(error, TimeoutError | BlockingIOError):
            return RequestTimeout(
                f"{self.address} did not answer in time",
                hint="the request may have been carried out",
            )
        why = "was closed by the peer" if error is None else f"broke: {error.strerror or error}"
        return ConnectionLost(f"the connection to {self.address} {why}")


def dial(
    addresses: Sequence[Address],
    conversation: Callable[[], Conversation],
    deadline: float,
    *,
    patient: bool = True,
) -> Connection:
    """A welcomed connection to the first address that answers; where none does, the
    `patient` try until the deadline.

    Raises BrokerUnavailable with what was tried. Where every address answered and none
    will do, it raises why at once.
    """
    began, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        failures: dict[Address, TxmqError] = {}
        for place, address in enumerate(addresses):
            left = deadline - time.monotonic()
            try:
                return _open(
                    address,
                    conversation(),
                    time.monotonic() + max(left, 0.001) / (len(addresses) - place),
                )
            except TxmqError as error:
                failures[address] = error
        if not any(error.retriable for error in failures.values()):
            raise next(iter(failures.values()))
        left = deadline - time.monotonic()
        if left <= pause or not patient:
            raise _unavailable(failures, time.monotonic() - began)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _open(address: Address, conversation: Conversation, deadline: float) -> Connection:
    try:
        sock = socket.create_connection(address, max(deadline - time.monotonic(), 0.001))
    except OSError as error:
        raise BrokerUnavailable(f"{error.strerror or error}") from error
    connection = Connection(sock, conversation, address)
    try:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _refuse_oneself(sock)
        connection.greet(deadline)
    except OSError as error:  # the peer was gone again before a word was said
        connection.close()
        raise BrokerUnavailable(f"{error.strerror or error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_oneself(sock: socket.socket) -> None:
    """A port that nobody listens on may be given to the very socket that connects to
    it.
    """
    if sock.getsockname() == sock.getpeername():
        raise BrokerUnavailable(f"{errno.errorcode[errno.ECONNREFUSED]}: nobody listens there")


def _unavailable(failures: dict[Address, TxmqError], took_s: float) -> BrokerUnavailable:
    tried = "; ".join(
        error.message if str(address) in error.message else f"{address}: {error.message}"
        for address, error in failures.items()
    )
    return BrokerUnavailable(
        f"no broker answered within {took_s:.1f} s ({tried})",
        hint="is it running, and is the address right? start one with: txmq broker --data DIR",
    )
