"""A TCP proxy that injects network faults: partitions, resets, delays, loss, low
bandwidth.

    with FaultProxy(("127.0.0.1", 7650)) as proxy:
        client = txmq.connect(f"txmq://127.0.0.1:{proxy.port}", service="orders")
        proxy.cut()      # a black hole: connections stay open, no data arrives
        proxy.heal()     # delayed data arrives

The target is a port, or a directory with the Unix socket of a PostgreSQL server.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Event, Lock, Thread
from typing import Self

from psycopg2.extensions import make_dsn, parse_dsn

CHUNK = 1 << 16
ENDS_WITHIN_S = 5.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closed with a reset
DEFAULT_PORT = "5432"


@dataclass(slots=True)
class NetworkConditions:
    """Delay, loss and bandwidth of the proxy.

    Each chunk of at most `chunk` bytes takes `delay_s`. A share of `loss` of the chunks
    takes `resend_s` more, as a TCP retransmission does. `bytes_per_s` is the bandwidth,
    None for no limit.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    resend_s: float = 0.2
    bytes_per_s: float | None = None
    chunk: int = CHUNK


class FaultProxy:
    """A proxy to `target` (host, port) that listens on `port`.

    Changes of `conditions` apply to the data that follows. `seed` selects the lost
    chunks.
    """

    def __init__(self, target: tuple[str, int], seed: int = 1) -> None:
        self.conditions = NetworkConditions()
        self._target, self._chance = target, Random(seed)
        self._through, self._over, self._refusing = Event(), Event(), False
        self._through.set()
        self._lock = Lock()
        self._held = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._abandoned: set[socket.socket] = set()
        self._threads: list[Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    @classmethod
    def to_database(cls, dsn: str) -> tuple[Self, str]:
        """Return a proxy to a PostgreSQL server, and the DSN through it."""
        fields = parse_dsn(dsn)
        link = cls(
            (fields.get("host", "/var/run/postgresql"), int(fields.get("port", DEFAULT_PORT)))
        )
        return link, make_dsn(dsn, host="127.0.0.1", port=link.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def held(self) -> int:
        """The number of chunks and new connections that wait for `heal`."""
        return self._held

    def cut(self) -> None:
        """Stop all data in both directions without an error; new connections hang,
        too.
        """
        self._through.clear()

    def heal(self) -> None:
        """Deliver the data that waits, and let all data through again."""
        self._refusing = False
        self._through.set()

    def reset(self, *, refuse: bool = False) -> None:
        """Reset all connections at both ends and drop the data in transit.

        With `refuse` new connections are reset as well, until `heal`.
        """
        self._refusing = refuse
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)

    def abandon(self) -> None:
        """Reset all connections at the target only, which leaves the clients half
        open.
        """
        with self._lock:
            targets = [target for _client, target in self._pairs]
        self._abandoned.update(targets)
        for target in targets:
            _reset(target)

    def close(self) -> None:
        """Close all connections and stop the proxy."""
        self._over.set()
        self._through.set()
        for each in (self._listener, *(end for pair in self._pairs for end in pair)):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(ENDS_WITHIN_S)

    def _start(self, function: Callable[..., None], *args: object) -> None:
        thread = Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        self._wait()
        if self._refusing or self._over.is_set():
            _reset(client)
            return
        try:
            target = self._dialled()
        except OSError:
            _reset(client)
            return
        with self._lock:
            self._pairs.append((client, target))
        self._start(self._pump, client, target)
        self._start(self._pump, target, client)

    def _dialled(self) -> socket.socket:
        host, port = self._target
        if not host.startswith("/"):
            return socket.create_connection(self._target)
        local = socket.socket(socket.AF_UNIX)
        local.connect(str(Path(host) / f".s.PGSQL.{port}"))
        return local

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(self.conditions.chunk):
                self._travel(len(data))
                self._wait()
                sink.sendall(data)
            if source not in self._abandoned:
                sink.shutdown(socket.SHUT_WR)

    def _travel(self, size: int) -> None:
        weather = self.conditions
        seconds = weather.delay_s + (
            weather.resend_s if self._chance.random() < weather.loss else 0.0
        )
        if weather.bytes_per_s is not None:
            seconds += size / weather.bytes_per_s
        if seconds:
            self._over.wait(seconds)

    def _wait(self) -> None:
        if self._through.is_set():
            return
        with self._lock:
            self._held += 1
        self._through.wait()
        with self._lock:
            self._held -= 1


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.shutdown(socket.SHUT_RDWR)
    end.close()
