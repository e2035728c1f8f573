"""A welcomed connection that never blocks: what the kernel does not take now waits
here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Self

from txmq.client.blocking.connections.connection import Connection
from txmq.errors import ConnectionLost
from txmq.wire.frames import Frame

READ_BYTES = 1 << 16
PIECES_AT_ONCE = 512  # the kernel takes at most 1024 buffers in one call


class Stream:
    """For one thread, which waits for the socket by itself. Raises ConnectionLost once
    the peer is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.socket = connection.socket
        self.conversation = connection.conversation
        self.socket.setblocking(False)
        self._unsent: deque[memoryview] = deque()

    @property
    def unsent(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._unsent)

    def write(self, pieces: Iterable[bytes] = ()) -> None:
        """Writes what waits and then these pieces, as far as the kernel takes them."""
        self._unsent.extend(map(memoryview, pieces))
        try:
            while self._unsent:
                self._sent(self.socket.sendmsg(list(islice(self._unsent, PIECES_AT_ONCE))))
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(
                f"the connection to {self._connection.address} broke: {error.strerror}"
            ) from error

    def read(self) -> list[Frame]:
        """The replies that have come, possibly none yet. Raises RemoteProtocolError as
        well.
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
            raise ConnectionLost(
                f"the connection to {self._connection.address} broke: {error.strerror}"
            ) from error
        if not data:
            raise ConnectionLost(
                f"the connection to {self._connection.address} was closed by the peer"
            )
        return data

    def abort(self) -> None:
        """Ends the connection: who waits for the socket will meet its end."""
        self._connection.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _sent(self, size: int) -> None:
        while size:
            piece = self._unsent.popleft()
            if len(piece) > size:
                self._unsent.appendleft(piece[size:])
                return
            size -= len(piece)
