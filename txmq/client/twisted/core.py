"""What the parts of a client with the Twisted face share: its connection, what it knows
of topics, its sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from uuid import UUID

from twisted.internet.task import deferLater

from txmq.client.blocking.client import Client as BlockingClient
from txmq.client.blocking.core import Core as BlockingCore
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.conversation import Conversation, LogPin, Payload, returned
from txmq.client.protocol.sender.topics import Shape, Topics
from txmq.client.protocol.settings import Settings
from txmq.client.twisted.connection import Connected, Link, timed, too_late
from txmq.client.twisted.protocols import Reactor
from txmq.client.twisted.sender import Sending
from txmq.client.twisted.threads import Threads
from txmq.errors import ClientClosed, ConnectionLost, TxmqError
from txmq.wire.calls import encode_call
from txmq.wire.headers import Opcode

T = TypeVar("T")


def closed() -> ClientClosed:
    """The error for every call after `close`."""
    return ClientClosed("the client was closed", hint="make a new one with txmq.twisted.connect")


class Core:
    """One client's share of the world, for the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        url: str,
        settings: Settings,
        *,
        elsewhere_after: float | None = None,
    ) -> None:
        """`elsewhere_after`: see Sending."""
        self.reactor, self.settings = reactor, settings
        self.threads = Threads(reactor, settings.connections)
        self.topics = Topics(self._described, settings.partitioner, settings.packing)
        self.sending = Sending(reactor, self.topics, settings, self.refresh, elsewhere_after)
        self.closed = False
        self._url, self._addresses, self._pin = url, parse_url(url), LogPin(settings.log_id)
        self._incarnation = settings.incarnation()
        self._descriptions: dict[str, dict[str, Any]] = {}
        self._blocking: BlockingClient | None = None
        self._connected: Connected | None = None

    def _described(self, topic: str) -> dict[str, Any]:
        """The reply that `refresh` has just waited for."""
        return self._descriptions.pop(topic)

    @property
    def known_log_id(self) -> UUID | None:
        """The broker's log, as soon as there was a connection, or if it was given."""
        return self._pin.log_id

    async def log_id(self) -> UUID:
        """The log of the broker, which is asked if need be."""
        if self._pin.log_id is None:
            await self.request(Opcode.PING, repeat=True)
        assert self._pin.log_id is not None, "the welcome told it"
        return self._pin.log_id

    @property
    def blocking(self) -> BlockingClient:
        """The blocking client that works for this one in threads, made at the first
        use.
        """
        if self.closed:
            raise closed()
        if self._blocking is None:
            self._blocking = BlockingClient(
                BlockingCore(self._url, self.settings, self._incarnation)
            )
        return self._blocking

    def link(self) -> Link:
        """A new connection, not yet made; replies that nobody waits for go to the
        sends.
        """
        conversation = Conversation(self.settings.service, self._pin, self._incarnation)
        return Link(self.reactor, conversation, self.sending.received)

    def connected(self) -> Connected:
        """The connection of this client, made at the first use."""
        if self.closed:
            raise closed()
        if self._connected is None:
            self._connected = Connected(
                self.reactor, self._addresses, self.link, self.sending.attach
            )
        return self._connected

    @property
    def is_away(self) -> bool:
        """Whether the broker is being looked for, so that another one would do
        better.
        """
        return self._connected is not None and not self.sending.connected

    def connect_apart(
        self, attach: Callable[[Link], None], refused: Callable[[TxmqError], None] | None = None
    ) -> Connected:
        """A connection of its own, for a consumer or a reader; for the arguments see
        Connected.
        """
        if self.closed:
            raise closed()
        return Connected(self.reactor, self._addresses, self.link, attach, refused)

    async def request(
        self, opcode: int, payload: Payload = b"", *, longer: float = 0.0, repeat: bool = False
    ) -> bytes:
        """The payload of the reply, `longer` than usual if need be; `repeat` = it does
        no harm to ask again.
        """
        patience = self.settings.timeout + longer
        ends = self.reactor.seconds() + patience
        left = self.settings.retries if repeat else 0
        while True:
            link = await self.connected().link(ends - self.reactor.seconds())
            try:
                reply = link.request(opcode, payload)
                return await timed(
                    self.reactor, reply, ends - self.reactor.seconds(), too_late(patience)
                )
            except ConnectionLost:
                if not left:
                    raise
                left -= 1

    async def asked(
        self, name: str, args: dict[str, Any], *, longer: float = 0.0, repeat: bool = False
    ) -> dict[str, Any]:
        """What a control call returns."""
        return returned(
            await self.request(Opcode.CALL, encode_call(name, args), longer=longer, repeat=repeat)
        )

    async def carried(
        self,
        opcode: int,
        payload: Payload,
        decode: Callable[[bytes], T] = bytes,  # type: ignore[assignment]  # as of Outbox.carry
        rebuild: Callable[[], bytes] | None = None,
    ) -> T:
        """The reply to a request that does no harm twice, over as many connections as
        it takes: see `Outbox.carry`.
        """
        self.connected()
        return await self.sending.carry(opcode, payload, decode, rebuild)

    async def shape(self, topic: str) -> Shape:
        """The topic as last seen; the first look asks the broker."""
        return self.topics.known(topic) or await self.refresh(topic)

    async def refresh(self, topic: str) -> Shape:
        """The topic as it is now."""
        self._descriptions[topic] = await self.asked(
            "topic.describe", {"names": [topic], "create": True}, repeat=True
        )
        return self.topics.refresh(topic)

    async def flushed(self, patience: float) -> bool:
        """Waits until all sends have their answers, at most so many seconds; whether
        they have.
        """
        ends = self.reactor.seconds() + patience
        while not self.sending.idle and self.reactor.seconds() < ends:
            await deferLater(self.reactor, 0.01)
        return self.sending.idle

    async def close(self) -> None:
        """Lets sends finish for a while, then ends every connection and thread."""
        if self.closed:
            return
        self.closed = True
        if self._connected is not None:
            await self.flushed(self.settings.timeout)
        self.sending.close()
        if self._connected is not None:
            await self._connected.stop()
        if self._blocking is not None:
            await self.threads.run(self._blocking.close, self.settings.timeout)
        await self.threads.stop()
