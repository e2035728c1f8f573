"""A network between client and broker that loses replies."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import suppress
from typing import Self

from txmq.client.protocol.address import parse_url
from txmq.model import limits
from txmq.wire.frames import FrameDecoder


class Proxy:
    """Relays connections to a broker.

    `lose[opcode] = n`: the next n replies of that opcode end their connection instead.
    `hold`: replies of these opcodes are dropped, and the connection stays; `held` =
    how often.
    """

    def __init__(self, url: str) -> None:
        self._target = parse_url(url)[0]
        self.lose: Counter[int] = Counter()
        self.hold: set[int] = set()
        self.held = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"txmq://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def cut(self) -> None:
        """End all connections, and stop listening."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._threads[0].join()
        self.cut()  # a connection that came meanwhile
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed, or the broker is away
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                broker = socket.create_connection(self._target)
                self._sockets.append(broker)
                for relay, ends in (
                    (self._requests, (client, broker)),
                    (self._replies, (broker, client)),
                ):
                    thread = threading.Thread(target=relay, args=ends, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _requests(self, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                broker.sendall(data)
            broker.shutdown(socket.SHUT_RDWR)

    def _replies(self, broker: socket.socket, client: socket.socket) -> None:
        decoder = FrameDecoder(limits.FRAME)
        with suppress(OSError):
            while data := broker.recv(1 << 16):
                kinds = {frame.opcode for frame in decoder.feed(data)}
                if lost := kinds & {kind for kind, left in self.lose.items() if left}:
                    self.lose.subtract(lost)
                    break
                if kinds & self.hold:
                    self.held += 1
                else:
                    client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
