"""A blocking connection: the caller's own thread writes a request and reads its reply.

A receive waits by poll, whose rest Python computes again after each signal. The
kernel's time-out (SO_RCVTIMEO) would save that system call, and begins anew with each
signal, or when a process that was stopped goes on: one with a timer never times out.
After a time-out, an I/O error or a protocol error the connection is closed, because a
late reply must not meet a later request.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from txmq.client.protocol.address import Address, Addresses, TlsSettings
from txmq.client.protocol.conversation import (
    Conversation,
    LogIdentity,
    Payload,
    no_answer,
    reply_payload,
)
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    RequestTimeout,
    TxmqError,
)
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame
from txmq.wire.hello import BrokerLimits, Welcome
from txmq.wire.json import parse_result
from txmq.wire.lost_peers import notice_lost_peer
from txmq.wire.status import OK

READ_BYTES = 1 << 16  # of one receive; above, malloc maps and unmaps memory each time
LARGE_READ_BYTES = 1 << 20  # within a large reply
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5  # between rounds of attempts to connect
BUFFERS_AT_ONCE = 512  # the kernel accepts at most 1024 in one call


class Connection:
    """A welcomed connection. For one thread at a time."""

    welcome: Welcome
    limits: BrokerLimits  # the broker's, from the welcome

    def __init__(self, sock: socket.socket, conversation: Conversation, address: Address) -> None:
        self.socket = sock
        self.conversation = conversation
        self.address = conversation.address = address
        self.closed = False
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._replies: dict[int, Frame] = {}
        self._callbacks: dict[int, Callable[[Frame], None]] = {}

    def request(self, opcode: int, payload: Payload = b"", *, timeout: float) -> bytes:
        """Return the payload of the reply, within `timeout` seconds.

        Raises RequestRejected where the broker refused the request, and ConnectionLost
        or RequestTimeout where the request may have been carried out.
        """
        deadline = time.monotonic() + timeout
        return self.read(self.write(opcode, payload, deadline), deadline)

    def call(
        self, name: str, args: dict[str, Any] | None = None, *, timeout: float
    ) -> dict[str, Any]:
        """Return the result of a control call. Raises as `request`."""
        payload = encode_call(name, args or {})
        return parse_result(self.request(Opcode.CALL, payload, timeout=timeout))

    def write(self, opcode: int, payload: Payload, deadline: float) -> int:
        """Send a request and return its correlation, for `read`. Several may be in
        flight.
        """
        correlation, pieces = self.conversation.request(opcode, payload)
        self._send(pieces, deadline)
        return correlation

    def read(self, correlation: int, deadline: float) -> bytes:
        """Return the payload of the reply to that request, and keep other replies."""
        while correlation not in self._replies:
            self._dispatch(self.receive(deadline))
        reply = self._replies.pop(correlation)
        return reply.payload if reply.status == OK else reply_payload(reply)

    def write_with_callback(
        self, opcode: int, payload: Payload, callback: Callable[[Frame], None]
    ) -> int | None:
        """Send a request whose reply goes to `callback`, when any later read meets it.

        Never waits. Returns the correlation, or None where the request was not sent:
        the connection is closed then.
        """
        correlation, pieces = self.conversation.request(opcode, payload)
        self._callbacks[correlation] = callback
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

    def wait_for_callback(self, correlation: int, deadline: float) -> None:
        """Read until that request's callback has its reply. Raises as `read`."""
        while correlation in self._callbacks:
            self._dispatch(self.receive(deadline))

    def read_available(self) -> None:
        """Read the replies that have come, without waiting. Close a lost connection."""
        try:
            data = self.socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            if data:
                self._dispatch(self.conversation.receive(data))
                return
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            pass
        self.close()

    def _dispatch(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            callback = self._callbacks.pop(frame.correlation, None)
            if callback is None:
                self._replies[frame.correlation] = frame
            else:
                callback(frame)

    def receive(self, deadline: float) -> list[Frame]:
        """Return the replies that the next bytes complete, if any.

        For callers with several requests in flight.
        """
        size = LARGE_READ_BYTES if self.conversation.in_large_reply else READ_BYTES
        try:
            while True:
                self._wait(self._readable, deadline)
                with suppress(BlockingIOError):  # a part of a record of TLS
                    data = self.socket.recv(size, socket.MSG_DONTWAIT)
                    break
            if data:
                return self.conversation.receive(data)
        except OSError as error:
            raise self._lost(error) from error
        except ProtocolError as error:
            self.close()
            error.outcome = "unknown"  # of the requests in flight
            raise
        except BaseException:  # a signal: the reply would meet a later request
            self.close()
            raise
        raise self._lost(None)

    def greet(self, deadline: float) -> None:
        """Send the hello and wait for the welcome.

        Raises as `request` and `Conversation.receive`.
        """
        self._send(self.conversation.hello(), deadline)
        while (welcome := self.conversation.welcome) is None:
            self.receive(deadline)
            if self.conversation.outgoing:
                self._send(self.conversation.take_outgoing(), deadline)
        self.welcome, self.limits = welcome, welcome.limits

    def is_stale(self) -> bool:
        """Return whether an idle connection was closed by the peer, has bytes that no
        request asked for, or leads to a node after which another one leads. What the
        broker tells unasked is read: it may be the last that this client hears of where
        the nodes are.
        """
        if self.conversation.is_superseded:
            return True
        if self._callbacks:
            self.read_available()
            return self.closed
        try:
            while self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self.read_available()
                if self.closed:
                    return True
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close the connection. Requests in flight have an unknown outcome."""
        self.closed = True
        if self.conversation.registering:
            self.conversation.close()
        self.socket.close()

    def abort(self) -> None:
        """End the connection from another thread. A thread that waits for a reply gets
        ClientClosed.
        """
        self.closed = True
        with suppress(OSError):  # lost already
            self.socket.shutdown(socket.SHUT_RDWR)

    def _send(self, pieces: Sequence[bytes], deadline: float) -> None:
        if deadline <= time.monotonic():
            raise self._lost(TimeoutError())
        try:
            try:
                sent = self.socket.sendmsg(pieces[:BUFFERS_AT_ONCE], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
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
            self._wait(self._writable, deadline)
            with suppress(BlockingIOError):
                view = view[self.socket.send(view, socket.MSG_DONTWAIT) :]

    def _wait(self, socket_is: select.poll, deadline: float) -> None:
        """Wait until the socket is ready. Raises TimeoutError at the deadline."""
        left = deadline - time.monotonic()
        if left <= 0 or not socket_is.poll(left * 1_000):
            raise TimeoutError

    def _lost(self, error: OSError | None) -> ConnectionLost | RequestTimeout | ClientClosed:
        """Close the connection and return its error. None: the peer closed it."""
        if self.closed:
            return ClientClosed("the connection was closed by another thread")
        self.close()
        if isinstance(error, TimeoutError | BlockingIOError):
            self.conversation.note_silence()
            return RequestTimeout(
                f"{self.address} did not answer in time",
                hint="the request may have been carried out",
            )
        why = "was closed by the peer" if error is None else f"broke: {error.strerror or error}"
        return ConnectionLost(f"the connection to {self.address} {why}")


def open_connection(
    addresses: Addresses,
    log: LogIdentity,
    conversation: Callable[[], Conversation],
    deadline: float,
    *,
    retry: bool = True,
) -> Connection:
    """Return a welcomed connection to the first address that answers, of the nodes
    that share the `log` and of those given.

    Where no address answers, `retry` until the deadline, and then raise
    BrokerUnavailable with all failures. Where all of them answer with a permanent
    error, raise it at once.
    """
    began, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        failures: dict[Address, TxmqError] = {}
        for address, share in log.in_turn(addresses, lambda: deadline - time.monotonic()):
            ends = time.monotonic() + share
            try:
                begun = conversation().log_in(addresses.login)
                return _open(address, begun, ends, addresses.tls)
            except TxmqError as error:
                failures[address] = error
                if time.monotonic() >= ends:
                    log.note_silence(address)
        if not any(error.retriable for error in failures.values()):
            raise next(iter(failures.values()))
        if deadline - time.monotonic() <= pause or not retry:
            tried = {str(address): error for address, error in failures.items()}
            took_s = time.monotonic() - began
            raise no_answer(took_s, tried, encrypted=addresses.tls is not None)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _open(
    address: Address, conversation: Conversation, deadline: float, tls: TlsSettings | None
) -> Connection:
    try:
        sock = _dial(address, deadline)
    except OSError as error:
        raise BrokerUnavailable(f"{error.strerror or error}") from error
    if tls is not None:
        sock = _encrypted(sock, tls, address, deadline)
    connection = Connection(sock, conversation, address)
    try:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_lost_peer(sock, socket)
        _refuse_self_connection(sock)
        connection.greet(deadline)
    except OSError as error:  # the peer closed the connection before the hello
        connection.close()
        raise BrokerUnavailable(f"{error.strerror or error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _dial(address: Address, deadline: float) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses that
    answers.

    Each has a share of the time: one may be a black hole, as that of a machine that is
    gone, or of a network that drops IPv6. Raises OSError, that of the last address.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for left, (family, kind, protocol, _name, target) in zip(
        range(len(found), 0, -1), found, strict=True
    ):
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(max(deadline - time.monotonic(), 0.001) / left)
        try:
            sock.connect(target)
        except OSError:
            sock.close()
            if left == 1:
                raise
        else:
            return sock
    raise OSError(f"{address.host} has no address")


def _encrypted(
    sock: socket.socket, tls: TlsSettings, address: Address, deadline: float
) -> socket.socket:
    # programs without TLS need not load it
    from txmq.client.blocking.connections.tls_socket import TlsSocket  # noqa: PLC0415

    encrypted = TlsSocket(sock, tls, address)
    try:
        encrypted.shake_hands(deadline)
    except OSError as error:
        encrypted.close()
        raise BrokerUnavailable(f"{error.strerror or error}") from error
    except BaseException:
        encrypted.close()
        raise
    return encrypted


def _refuse_self_connection(sock: socket.socket) -> None:
    """Raise BrokerUnavailable for a socket that is connected to itself.

    The kernel may choose a port without a listener as the source port of a connection
    to that port.
    """
    if sock.getsockname() == sock.getpeername():
        raise BrokerUnavailable(f"{errno.errorcode[errno.ECONNREFUSED]}: nobody listens there")
