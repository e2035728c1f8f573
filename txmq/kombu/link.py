"""The one client of a connection's channels."""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from functools import cached_property
from math import inf
from threading import Event
from typing import Any, Final

from kombu.transport.virtual.base import BrokerState
from kombu.transport.virtual.exchange import STANDARD_EXCHANGE_TYPES

import txmq
from txmq.errors import TopicExists
from txmq.kombu.address import Names, address_of
from txmq.kombu.bindings import RENEWED_S, Bindings
from txmq.kombu.messages import lifetime, read
from txmq.kombu.publishing import ROUTING_KEY, Publishing

HEARD: Final = 10_000  # messages that wait in a passing queue; the oldest go
KINDS: Final = {name: kind(None) for name, kind in STANDARD_EXCHANGE_TYPES.items()}


class Link:
    """One client of a broker, what it sends, and what its consumers wait for.

    `passing`: the messages of queues that live here, by their names, each with the time
    when it expires. `ttls`: how long messages of queues live that were declared here,
    in seconds. The threads of consumers `wake` whoever waits for messages.
    """

    def __init__(self, connection: Any, declared: BrokerState) -> None:
        self._connection, self._declared = connection, declared
        self.names = Names(connection.virtual_host)
        self.passing: dict[str, deque[tuple[float, dict[str, Any]]]] = {}
        self.ttls: dict[str, float] = {}
        self._listening: dict[str, txmq.Consumer] = {}  # by exchange
        self.woken = Event()
        self._waker: socket.socket | None = None  # of an event loop
        self._is_loop_woken = False
        self._look_at = time.monotonic() + RENEWED_S / 24

    @cached_property
    def client(self) -> txmq.Client:
        """The client, from its first use on: Kombu makes transports to ask what they
        can do.
        """
        patience = self._connection.connect_timeout or 10.0
        return txmq.connect(address_of(self._connection), service="celery", timeout=patience)

    @cached_property
    def publishing(self) -> Publishing:
        """Messages on their way to the broker."""
        confirmed = self.option("confirm_publish", True)
        return Publishing(self.client, confirmed=bool(confirmed))

    @cached_property
    def bindings(self) -> Bindings:
        """The queues that are bound to exchanges of the virtual host."""
        return Bindings(self.client, self.names.bindings)

    def option(self, name: str, default: Any) -> Any:
        """Return one of the connection's `transport_options`."""
        return self._connection.transport_options.get(name, default)

    def wake(self) -> None:
        """Have messages looked for. Any thread may call this."""
        self.woken.set()
        waker = self._waker
        if waker is not None and not self._is_loop_woken:
            self._is_loop_woken = True
            with suppress(OSError):  # it is full of wake-ups, or closed
                waker.send(b"!")

    def readable_when_woken(self) -> socket.socket:
        """Return a socket that is readable whenever messages are to be looked for."""
        readable, waker = socket.socketpair()
        readable.setblocking(False)
        waker.setblocking(False)
        self._waker, self._is_loop_woken = waker, False
        self.wake()  # some may be there
        return readable

    def forget_loop(self) -> None:
        """Wake no event loop any more."""
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()

    def listen(self, exchange: str, queue: str) -> None:
        """Have what is said to an exchange from now on come to a passing queue."""
        self.passing.setdefault(queue, deque(maxlen=HEARD))
        if exchange in self._listening:
            return
        topic = self.names.exchange(exchange)
        with suppress(TopicExists):
            self.client.call("topic.create", name=topic, partitions=1)
        consumer = self.client.consumer(topic, [topic], mode="broadcast")
        consumer.tell(self.wake)
        self._listening[exchange] = consumer

    def hear(self) -> None:
        """Take what was said to the passing queues."""
        self._is_loop_woken = False
        for exchange, consumer in self._listening.items():
            while (said := consumer.receive(0)) is not None:
                consumer.ack(said)
                with suppress(ValueError, TypeError, OverflowError):  # no message of Kombu's
                    for queue in self._listeners(exchange, said.headers.get(ROUTING_KEY, "")):
                        message = read(said.body)
                        expires_at = said.stored_at / 1e6 + (lifetime(message) or inf)
                        self.passing[queue].append((expires_at, message))
        if time.monotonic() >= self._look_at:  # so that no record grows too old
            self._look_at = time.monotonic() + RENEWED_S / 24
            self.bindings.look()

    def _listeners(self, exchange: str, routing_key: str) -> list[str]:
        declared = self._declared.exchanges.get(exchange)
        if declared is None:
            return []
        table = declared["table"]
        found = KINDS[declared["type"]].lookup(table, exchange, routing_key, None)
        return [queue for queue in found if queue in self.passing]

    def close(self) -> None:
        """Close the client and its consumers. Raises OperationalError where messages
        have no receipt.
        """
        if "client" in self.__dict__:  # else it was never used
            self.client.close()
        if "publishing" in self.__dict__:
            self.publishing.check()
