"""A socket with TLS behaves like a plain one."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from txmq.client.blocking.connections.tls_socket import TlsSocket
from txmq.client.protocol.address import Address, TlsSettings


class NotEncrypted(TlsSocket):
    """What it gets is the plain text."""

    def _decrypted(self) -> bytes | None:
        return self._incoming.read()


def test_what_was_looked_at_is_read_again() -> None:
    """An idle connection is looked at: the nodes of a cluster may have told news."""
    ours, theirs = socket.socketpair()
    address = Address("127.0.0.1", 7650)
    with closing(NotEncrypted(ours, TlsSettings(), address)) as client, closing(theirs) as server:
        server.sendall(b"news")
        assert client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"news"
        assert client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"news"
        assert client.recv(100, socket.MSG_DONTWAIT) == b"news"
        with pytest.raises(BlockingIOError):
            client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
