"""A connection of Kombu's."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from kombu.transport import virtual

import txmq
from txmq.client.protocol.address import PORT
from txmq.errors import BrokerUnavailable, ClientClosed, ConnectionLost, RequestTimeout, TxmqError
from txmq.kombu.channel import Channel
from txmq.kombu.link import Link
from txmq.kombu.queues import PREFETCH


class Transport(virtual.Transport):  # type: ignore[misc]  # Kombu has no types
    """A connection of Kombu's.

    `drain_events` waits for a message and delivers it; an event loop delivers all that
    have come.
    """

    Channel = Channel
    default_port = PORT
    polling_interval = None  # nothing is polled
    driver_type = driver_name = "txmq"
    connection_errors = (
        *virtual.Transport.connection_errors,
        BrokerUnavailable,
        ConnectionLost,
        ClientClosed,
        RequestTimeout,
    )
    channel_errors = (*virtual.Transport.channel_errors, TxmqError)
    # Without these Kombu takes refusals for lost connections, too: a task that is too
    # large would close the connection and be sent once more.
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = virtual.Transport.channel_errors
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.link = Link(client, self.state)
        self._loop: Any = None
        self._readable: socket.socket | None = None

    def driver_version(self) -> str:
        """Return txmq's version."""
        return txmq.__version__

    def establish_connection(self) -> Transport:
        """Connect; raises BrokerUnavailable."""
        self.link.client.call("broker.show")
        super().establish_connection()
        return self

    def drain_events(self, connection: object, timeout: float | None = None) -> None:
        """Deliver a message of any channel; raises TimeoutError after `timeout`."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self.link.woken.clear()
            self.link.hear()
            if any(channel.deliver_one(self._deliver) for channel in self._in_turn()):
                return
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise socket.timeout  # noqa: UP041  # what Kombu's callers catch
            self.link.woken.wait(left)

    def _in_turn(self) -> list[Any]:
        """Return the channels; the one that was first is the last one next time."""
        channels = list(self.channels)
        if channels:
            self.channels.append(self.channels.pop(0))
        return channels

    def register_with_event_loop(self, connection: object, loop: Any) -> None:
        """Deliver messages in an event loop of Kombu's: while it handles events, so
        that what a message begins, such as a write, is part of its next round.
        """
        self._forget_loop()
        self._loop, self._readable = loop, self.link.readable_when_woken()
        loop.add_reader(self._readable.fileno(), self._deliver_all)

    def _deliver_all(self) -> None:
        """Deliver what has come. What comes meanwhile wakes the loop once more."""
        if self._readable is not None:
            with suppress(BlockingIOError):
                self._readable.recv(4_096)
        self.link.hear()
        for channel in list(self.channels):
            for _ in range(PREFETCH * len(channel._active_queues)):  # noqa: SLF001  # Kombu's
                if not channel.deliver_one(self._deliver):
                    break

    def _forget_loop(self) -> None:
        self.link.forget_loop()
        if self._readable is not None:
            self._loop.remove_reader(self._readable.fileno())
            self._readable.close()
        self._loop = self._readable = None

    def close_connection(self, connection: object) -> None:
        """Close all channels, and wait for what is on its way."""
        self._forget_loop()
        try:
            super().close_connection(connection)
        finally:
            self.link.close()
