"""Ports for servers that are restarted, and must find theirs free again."""

from __future__ import annotations

import secrets
import socket
from contextlib import closing, suppress
from typing import Final

# Below those that the kernel takes for outgoing connections: while the server is down
# nobody gets its port by chance.
PORTS: Final = range(20_000, 32_000)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    while True:
        port = secrets.choice(PORTS)
        with closing(socket.socket()) as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
