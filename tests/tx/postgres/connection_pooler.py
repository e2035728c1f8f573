"""A pool of server connections like pgbouncer's in transaction mode.

Each transaction gets another server connection. The pool speaks as much of PostgreSQL's
protocol as psycopg2 does. Clients of the pool itself authenticate its server
connections, and leave them behind.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from struct import Struct
from typing import NamedTuple, Self

import psycopg2
from psycopg2.extensions import make_dsn, parse_dsn

LENGTH = Struct(">I")
STARTUP = Struct(">II")
NO_ENCRYPTION, CANCEL = (80877103, 80877104), 80877102
LET_IN = b"R" + LENGTH.pack(8) + LENGTH.pack(0)
KEY = b"K" + LENGTH.pack(12) + bytes(8)
READY = b"Z" + LENGTH.pack(5) + b"I"
WITHOUT_REPLY = (0, 12)  # kinds of authentication messages
DONOR = "donor"


class ProtocolMessage(NamedTuple):
    """A message of the protocol, and all of its bytes."""

    kind: bytes
    data: bytes


class Pooler:
    """A pool that listens at `dsn`. `served` has the connection that served each
    transaction.
    """

    def __init__(self, dsn: str, size: int = 3) -> None:
        known = parse_dsn(dsn)
        self._target = (known["host"], int(known["port"]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.dsn = make_dsn(dsn, host=host, port=port)
        self.served: list[int] = []
        self._idle: deque[socket.socket] = deque()
        self._greeting = b""
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()
        self._fill(size)

    def _fill(self, size: int) -> None:
        for _ in range(size):
            psycopg2.connect(self.dsn, application_name=DONOR).close()

    def switch_over(self, dsn: str, size: int = 3) -> None:
        """Serve the next transactions from another server, as after a failover.

        Clients keep their connections.
        """
        known = parse_dsn(dsn)
        self._target = (known["host"], int(known["port"]))
        self._idle.clear()
        self._fill(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, EOFError), client:
            startup = _startup(client)
            if startup is None:
                return
            if DONOR.encode() in startup:
                self._take_over(client, startup)
            else:
                client.sendall(LET_IN + self._greeting + KEY + READY)
                self._transactions(client)

    def _take_over(self, client: socket.socket, startup: bytes) -> None:
        server = socket.create_connection(self._target)
        self._sockets.append(server)
        server.sendall(startup)
        parameters = b""
        for message in _messages(server):
            if message.kind == b"Z":
                self._greeting = parameters
                self._idle.append(server)
            client.sendall(message.data)
            if message.kind == b"Z":
                return
            if message.kind == b"S":
                parameters += message.data
            if message.kind == b"R" and LENGTH.unpack_from(message.data, 5)[0] not in WITHOUT_REPLY:
                server.sendall(next(_messages(client)).data)

    def _transactions(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        for request in _messages(client):
            if request.kind == b"X":
                return
            if server is None:
                server = self._idle.popleft()
                self.served.append(server.fileno())
            server.sendall(request.data)
            for reply in _messages(server):
                over = reply.kind == b"Z"
                if over and reply.data[-1:] == b"I":
                    self._idle.append(server)
                client.sendall(reply.data)
                if over:
                    server = server if reply.data[-1:] != b"I" else None
                    break


def _startup(client: socket.socket) -> bytes | None:
    """Return the startup message of a client, or None for a cancel request."""
    while True:
        head = _exactly(client, STARTUP.size)
        length, code = STARTUP.unpack(head)
        if code == CANCEL:
            return None
        if code not in NO_ENCRYPTION:
            return head + _exactly(client, length - STARTUP.size)
        client.sendall(b"N")


def _messages(source: socket.socket) -> Iterator[ProtocolMessage]:
    while True:
        head = _exactly(source, 5)
        yield ProtocolMessage(head[:1], head + _exactly(source, LENGTH.unpack(head[1:])[0] - 4))


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
