"""A broker that carries out requests while its client writes them, in one thread.

Nothing depends on the machine: a reply is there when the request has been written, no
timer runs, and the clock stands still until it is moved. So the same work always makes
the same calls.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tests.broker.support import BrokerInMemory, FakeResolver
from txmq.client.aio.connection import AioConnection, Connector
from txmq.client.blocking.connections import connection as blocking_connections

OnBroker = Callable[[], AbstractContextManager[None]]


class InlineBroker:
    """A broker in memory, and the ways of clients to it.

    `on_broker` is entered around its work. `writes` counts those of its clients.
    """

    def __init__(self, on_broker: OnBroker) -> None:
        self.memory = BrokerInMemory(FakeResolver())
        self.on_broker = on_broker
        self.writes = 0

    @contextmanager
    def dialled(self) -> Iterator[None]:
        """Lead all new connections of clients in this process here."""
        dial, open_ = blocking_connections._dial, Connector.open

        async def opened(
            _connector: Connector,
            loop: asyncio.AbstractEventLoop,
            make: Callable[[], AioConnection],
        ) -> AioConnection:
            link = make()
            link.connection_made(InlineTransport(self, loop, link))
            await link.welcomed
            return link

        blocking_connections._dial = lambda _address, _deadline: InlineSocket(self)  # type: ignore[assignment,return-value]  # all that is used of one
        Connector.open = opened  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            blocking_connections._dial = dial
            Connector.open = open_  # type: ignore[method-assign]


class _Peer:
    """The broker's end of one connection."""

    def __init__(self, broker: InlineBroker) -> None:
        self._broker = broker
        with broker.on_broker():
            self._client = broker.memory.connect(None)

    def exchange(self, data: bytes) -> bytes:
        """Return what the broker answers to these bytes at once."""
        self._broker.writes += 1
        with self._broker.on_broker():
            self._client.send(data)
        return self.answers()

    def answers(self) -> bytes:
        """Return what the broker has sent, such as the end of a long poll."""
        data: bytes = self._client.transport.value()
        self._client.transport.clear()
        return data


class InlineSocket:
    """The socket of a blocking client. It is always readable for `poll`."""

    def __init__(self, broker: InlineBroker) -> None:
        self._peer, self._unread = _Peer(broker), b""
        self._readable, writable = os.pipe()
        os.close(writable)

    def sendmsg(self, pieces: Sequence[bytes], _extra: object = (), _flags: int = 0) -> int:
        data = b"".join(pieces)
        self._unread += self._peer.exchange(data)
        return len(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._unread = self._unread or self._peer.answers()
        if not self._unread:
            raise BlockingIOError  # a client that waits here takes it for a time-out
        data = self._unread[:size]
        if not flags & socket.MSG_PEEK:
            self._unread = self._unread[size:]
        return data

    def fileno(self) -> int:
        return self._readable

    def getsockname(self) -> str:
        return "client"

    def getpeername(self) -> str:
        return "broker"

    def setsockopt(self, *_: object) -> None: ...
    def settimeout(self, _seconds: float | None) -> None: ...
    def setblocking(self, _blocking: bool) -> None: ...  # noqa: FBT001  # a socket's
    def shutdown(self, _how: int) -> None: ...

    def close(self) -> None:
        if self._readable >= 0:
            os.close(self._readable)
        self._readable = -1


class InlineTransport(asyncio.Transport):
    """The transport of a client on asyncio. Answers come in the loop's next turn."""

    def __init__(
        self, broker: InlineBroker, loop: asyncio.AbstractEventLoop, link: AioConnection
    ) -> None:
        super().__init__()
        self._peer, self._loop, self._link = _Peer(broker), loop, link

    def write(self, data: Any) -> None:
        answer = self._peer.exchange(bytes(data))
        if answer:
            self._loop.call_soon(self._deliver, answer)

    def _deliver(self, answer: bytes) -> None:
        self._link.get_buffer(-1)[: len(answer)] = answer
        self._link.buffer_updated(len(answer))

    def close(self) -> None:
        self._loop.call_soon(self._link.connection_lost, None)

    def abort(self) -> None:
        self.close()


class StillClock:
    """The clock of deadlines, which only `advance` moves, for this process."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def advance(self, seconds: float) -> None:
        self._now += seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the process go by it."""
        monotonic = time.monotonic
        time.monotonic = lambda: self._now
        try:
            yield
        finally:
            time.monotonic = monotonic
