"""A connection of Kombu's."""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from functools import cached_property
from math import inf
from threading import Event
from typing import Any, Final

from kombu.transport import virtual
from kombu.transport.virtual.exchange import STANDARD_EXCHANGE_TYPES

import txmq
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConnectionLost,
    RequestTimeout,
    TopicExists,
    TxmqError,
)
from txmq.kombu.address import PORT, Names, address_of
from txmq.kombu.bindings import RENEWED_S, Bindings
from txmq.kombu.channel import Channel
from txmq.kombu.messages import lifetime, read
from txmq.kombu.publishing import ROUTING_KEY, Publishing
from txmq.kombu.queues import PREFETCH

HEARD: Final = 10_000  # messages that wait in a passing queue; the oldest go
KINDS: Final = {name: kind(None) for name, kind in STANDARD_EXCHANGE_TYPES.items()}


class Transport(virtual.Transport):  # type: ignore[misc]  # Kombu has no types
    """A connection of Kombu's: one client of a broker.

    `passing`: the messages of queues that live here, by their names, each with the time
    when it expires. `ttls`: how long
    messages of queues live that were declared here, in seconds.

    The threads of the consumers wake the connection when messages have come. Then
    `drain_events` returns with one; an event loop calls `_tick`, which delivers all.
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
        self.names = Names(client.virtual_host)
        self.passing: dict[str, deque[tuple[float, dict[str, Any]]]] = {}
        self.ttls: dict[str, float] = {}
        self._listening: dict[str, txmq.Consumer] = {}  # by exchange
        self._woken = Event()
        self._hub: Any = None
        self._hub_called = False
        self._look_at = time.monotonic() + RENEWED_S / 24

    @cached_property
    def txmq_client(self) -> txmq.Client:
        """The client, from its first use on: Kombu makes transports to ask what they
        can do.
        """
        patience = self.client.connect_timeout or 10.0
        return txmq.connect(address_of(self.client), service="celery", timeout=patience)

    @cached_property
    def publishing(self) -> Publishing:
        """What is sent."""
        confirmed = self.client.transport_options.get("confirm_publish", True)
        return Publishing(self.txmq_client, confirmed=bool(confirmed))

    @cached_property
    def bindings(self) -> Bindings:
        """What is bound to the exchanges of the virtual host."""
        return Bindings(self.txmq_client, self.names.bindings)

    def driver_version(self) -> str:
        """Return txmq's version."""
        return txmq.__version__

    def establish_connection(self) -> Transport:
        """Connect; raises BrokerUnavailable."""
        self.txmq_client.call("broker.show")
        super().establish_connection()
        return self

    # --- deliveries

    def wake(self) -> None:
        """Look for messages. Any thread may call this."""
        self._woken.set()
        hub = self._hub
        if hub is not None and not self._hub_called:
            self._hub_called = True
            hub.call_soon(_nothing)  # the loop goes round, and each round ticks

    def drain_events(self, connection: object, timeout: float | None = None) -> None:
        """Deliver a message of any channel; raises TimeoutError after `timeout`."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._woken.clear()
            self._hear()
            if any(channel.deliver_one(self._deliver) for channel in self._in_turn()):
                return
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise socket.timeout  # noqa: UP041  # what Kombu's callers catch
            self._woken.wait(left)

    def _in_turn(self) -> list[Any]:
        """Return the channels; the one that was first is the last one next time."""
        channels = list(self.channels)
        if channels:
            self.channels.append(self.channels.pop(0))
        return channels

    def register_with_event_loop(self, connection: object, loop: Any) -> None:
        """Deliver messages in an event loop of Kombu's."""
        self._hub = loop
        loop.on_tick.add(self._tick)

    def _tick(self) -> None:
        """Deliver what has come. What comes meanwhile wakes the loop once more."""
        self._hub_called = False
        self._hear()
        for channel in list(self.channels):
            for _ in range(PREFETCH * len(channel._active_queues)):  # noqa: SLF001  # Kombu's
                if not channel.deliver_one(self._deliver):
                    break

    def listen(self, exchange: str, queue: str) -> None:
        """Have what is said to an exchange from now on come to a passing queue."""
        self.passing.setdefault(queue, deque(maxlen=HEARD))
        if exchange in self._listening:
            return
        topic = self.names.exchange(exchange)
        with suppress(TopicExists):
            self.txmq_client.call("topic.create", name=topic, partitions=1)
        consumer = self.txmq_client.consumer(topic, [topic], mode="broadcast")
        consumer.tell(self.wake)
        self._listening[exchange] = consumer

    def _hear(self) -> None:
        """Take what was said to the passing queues."""
        for exchange, consumer in self._listening.items():
            while (said := consumer.receive(0)) is not None:
                consumer.ack(said)
                with suppress(ValueError):  # no message of Kombu's
                    for queue in self._listeners(exchange, said.headers.get(ROUTING_KEY, "")):
                        message = read(said.body)
                        expires_at = said.stored_at / 1e6 + (lifetime(message) or inf)
                        self.passing[queue].append((expires_at, message))
        if time.monotonic() >= self._look_at:  # so that no record grows too old
            self._look_at = time.monotonic() + RENEWED_S / 24
            self.bindings.refresh()

    def _listeners(self, exchange: str, routing_key: str) -> list[str]:
        declared = self.state.exchanges.get(exchange)
        if declared is None:
            return []
        table = declared["table"]
        found = KINDS[declared["type"]].lookup(table, exchange, routing_key, None)
        return [queue for queue in found if queue in self.passing]

    def close_connection(self, connection: object) -> None:
        """Close all channels, and wait for what is on its way."""
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.on_tick.discard(self._tick)
        try:
            super().close_connection(connection)
        finally:
            if "txmq_client" in self.__dict__:  # else it was never used
                self.txmq_client.close()  # and its consumers
        if "publishing" in self.__dict__:
            self.publishing.check()


def _nothing() -> None:
    """Do nothing."""
