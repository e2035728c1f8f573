"""Ports for servers that are restarted and need the same port again."""

from __future__ import annotations

import secrets
import socket
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

# Below the ephemeral ports, so that no outgoing connection takes the port of a server
# that is down.
PORTS: Final = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of 127.0.0.1 without a listener."""
    while True:
        port = secrets.choice(PORTS)
        if _is_free(port):
            return port


def kept_port(file: Path) -> int:
    """Return the port that `file` has, or a free one where that is taken, and keep it
    there.
    """
    kept = file.read_text() if file.exists() else ""
    port = int(kept) if kept.isdecimal() and int(kept) in PORTS else 0
    if not port or not _is_free(port):
        port = free_port()
        file.write_text(str(port))
    return port


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as listener, suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        return True
    return False
