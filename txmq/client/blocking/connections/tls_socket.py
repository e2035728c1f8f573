"""A socket with TLS that behaves like a plain one, time-outs and flags included.

Python's SSLSocket knows neither `sendmsg` nor flags. Here the encryption is apart from
the socket: bytes of the plain text come from and go to memory.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from threading import RLock

from txmq.client.protocol.address import SCHEME, Address, TlsSettings
from txmq.client.tls import not_trusted, tls_context
from txmq.errors import BrokerUnavailable

PIECE = 1 << 16  # bytes that are encrypted at once
READ_BYTES = 1 << 16
WITHOUT_TLS = f"a broker without TLS has a URL that begins with {SCHEME}"


class TlsSocket(socket.socket):
    """A connected socket with TLS. Reads by one thread, and writes by one."""

    def __init__(self, plain: socket.socket, settings: TlsSettings, address: Address) -> None:
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self._lock = RLock()  # of the encryption, which is never waited in
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls_context(settings).wrap_bio(
            self._incoming, self._outgoing, server_hostname=address.host
        )
        self._address = address
        self._unsent = memoryview(b"")  # encrypted
        self._peeked = b""  # plain text that is read again
        self._owed = 0  # bytes of plain text that are encrypted, and not reported as sent

    def shake_hands(self, deadline: float) -> None:
        """Agree on keys before the deadline. Raises ConfigError for a certificate that
        is not trusted, BrokerUnavailable, and OSError.
        """
        while True:
            super().settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                super().sendall(self._outgoing.read())
                data = super().recv(READ_BYTES)
                if not data:
                    raise BrokerUnavailable(
                        f"{self._address} closed the connection: {WITHOUT_TLS}"
                    ) from None
                self._incoming.write(data)
            except ssl.SSLCertVerificationError as error:
                super().sendall(self._outgoing.read())  # says why to the broker
                raise not_trusted(self._address, error) from None
            except ssl.SSLError as error:
                raise BrokerUnavailable(
                    f"{self._address} does not speak TLS as expected, {error.reason}: {WITHOUT_TLS}"
                ) from None
            else:
                super().sendall(self._outgoing.read())
                return

    def sendmsg(  # type: ignore[override]  # the arguments that are used
        self,
        buffers: Iterable[bytes | memoryview],
        ancdata: Sequence[object] = (),
        flags: int = 0,
    ) -> int:
        """Send as much as the kernel takes. What is encrypted already is not encrypted
        again: callers go on with the same bytes.
        """
        del ancdata
        data = memoryview(b"".join(buffers))
        accepted, self._owed = self._owed, 0
        sent = 0  # of the plain text
        try:
            while True:
                self._flush(flags)
                sent = accepted
                if accepted >= len(data):
                    break
                with self._lock:
                    accepted += self._tls.write(data[accepted : accepted + PIECE])
        except BlockingIOError:
            if not sent:
                self._owed = accepted
                raise
        self._owed = accepted - sent
        return sent

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        """Send as `sendmsg`."""
        return self.sendmsg((data,), (), flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return all plain text that the next bytes hold; b"" = the peer closed."""
        data, self._peeked = self._peeked or self._received(size, flags & ~socket.MSG_PEEK), b""
        if flags & socket.MSG_PEEK:
            self._peeked = data
        return data

    def _received(self, size: int, flags: int) -> bytes:
        while True:
            data = self._decrypted()
            if data:
                return data
            if data is None:
                return b""
            received = super().recv(max(size, READ_BYTES), flags)
            if not received:
                return b""
            with self._lock:
                self._incoming.write(received)

    def _decrypted(self) -> bytes | None:
        """Return the plain text that is there; None = the peer has closed."""
        found: list[bytes] = []
        with self._lock:
            try:
                while piece := self._tls.read(READ_BYTES):
                    found.append(piece)
            except ssl.SSLWantReadError:
                return b"".join(found)
            except ssl.SSLZeroReturnError:
                pass
        return b"".join(found) or None

    def _flush(self, flags: int) -> None:
        with self._lock:
            if not self._unsent and self._outgoing.pending:
                self._unsent = memoryview(self._outgoing.read())
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent, flags) :]
