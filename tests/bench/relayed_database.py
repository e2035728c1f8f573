"""A relay in front of PostgreSQL that counts what a connection costs."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

from psycopg2.extensions import parse_dsn

COMMAND_COMPLETE = ord("C")
HEADER = 5  # of the server's messages: type and length


@dataclass(slots=True)
class Sent:
    """Round trips of a connection, and the statements that the server has carried
    out.
    """

    trips: int = 0
    statements: int = 0


class _Statements:
    """Counts the completed statements in the bytes of a server."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Return the number of statements that these bytes complete."""
        data, at, found = self._rest + data, 0, 0
        while len(data) - at >= HEADER:
            end = at + 1 + int.from_bytes(data[at + 1 : at + HEADER])
            if end > len(data):
                break
            found += data[at] == COMMAND_COMPLETE
            at = end
        self._rest = data[at:]
        return found


@contextmanager
def relayed(dsn: str) -> Iterator[tuple[str, Sent]]:
    """Return a DSN for one connection, and the count of what it has sent."""
    place, sent = parse_dsn(dsn), Sent()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=_relay, args=(listener, place, sent), daemon=True)
        thread.start()
        options = place | {
            "host": "127.0.0.1",
            "port": str(listener.getsockname()[1]),
            "sslmode": "disable",
            "gssencmode": "disable",
        }
        yield " ".join(f"{name}='{value}'" for name, value in options.items()), sent
        thread.join()


def _relay(listener: socket.socket, place: dict[str, str], sent: Sent) -> None:
    near, _ = listener.accept()
    with near, _connected(place) as far:
        statements, answered = _Statements(), True
        while True:
            for ready in select.select([near, far], [], [])[0]:
                data = ready.recv(1 << 16)
                if not data:
                    return
                if ready is near:
                    sent.trips += answered  # a request may come in pieces
                else:
                    sent.statements += statements.feed(data)
                answered = ready is far
                (far if ready is near else near).sendall(data)


def _connected(place: dict[str, str]) -> socket.socket:
    host, port = place.get("host", ""), int(place.get("port", 5432))
    if not host.startswith("/"):
        return socket.create_connection((host or "127.0.0.1", port))
    far = socket.socket(socket.AF_UNIX)
    far.connect(f"{host}/.s.PGSQL.{port}")
    return far
