"""Ports for servers that are restarted and need the same port again."""

from __future__ import annotations

import secrets
import socket
from contextlib import closing, suppress
from typing import Final

# Below the ephemeral ports, so that no outgoing connection takes the port of a server
# that is down.
PORTS: Final = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of 127.0.0.1 without a listener."""
    while True:
        port = secrets.choice(PORTS)
        with closing(socket.socket()) as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
