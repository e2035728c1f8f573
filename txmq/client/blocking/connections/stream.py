"""A connection that never blocks: bytes that the kernel does not accept wait here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Self

from txmq.client.blocking.connections.connection import (
    BUFFERS_AT_ONCE,
    READ_BYTES,
    Connection,
)
from txmq.errors import ConnectionLost
from txmq.wire.frames import Frame


class NonBlockingConnection:
    """A welcomed connection for one thread, which waits for the socket itself.

    `unsent` are the bytes that wait to be written, in pieces. Raises ConnectionLost
    once the peer has closed it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.socket = connection.socket
        self.conversation = connection.conversation
        self.socket.setblocking(False)
        self.unsent: deque[memoryview] = deque()

    def write(self, pieces: Iterable[bytes] = ()) -> None:
        """Write unsent bytes and then these, as many as the kernel accepts."""
        self.unsent.extend(map(memoryview, pieces))
        try:
            while self.unsent:
                size = self.socket.sendmsg(list(islice(self.unsent, BUFFERS_AT_ONCE)))
                self._drop_sent(size)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._broken(error) from error

    def read(self) -> list[Frame]:
        """Return the replies that have come, if any. Also raises
        RemoteProtocolError.
        """
        frames: list[Frame] = []
        while data := self._read():
            frames += self.conversation.receive(data)
            if not self.conversation.in_large_reply:
                break
        return frames

    def _read(self) -> bytes | None:
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._broken(error) from error
        if not data:
            raise ConnectionLost(
                f"the connection to {self._connection.address} was closed by the peer"
            )
        return data

    def abort(self) -> None:
        """End the connection from any thread."""
        self._connection.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _drop_sent(self, size: int) -> None:
        while size:
            piece = self.unsent.popleft()
            if len(piece) > size:
                self.unsent.appendleft(piece[size:])
                return
            size -= len(piece)

    def _broken(self, error: OSError) -> ConnectionLost:
        return ConnectionLost(
            f"the connection to {self._connection.address} broke: {error.strerror}"
        )
