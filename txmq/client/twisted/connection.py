"""Connections of the Twisted client: Deferreds around the conversation without I/O."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from twisted.application.internet import backoffPolicy
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import (
    IProtocol,
    IProtocolFactory,
    IPushProducer,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from zope.interface import implementer

from txmq.client.protocol.address import Address
from txmq.client.protocol.conversation import Conversation, Payload, no_answer, reply_payload
from txmq.client.twisted.protocols import DelayedCall, Reactor, TcpTransport
from txmq.errors import BrokerUnavailable, ConnectionLost, ProtocolError, RequestTimeout, TxmqError
from txmq.wire.frames import Frame
from txmq.wire.lost_peers import notice_lost_peer

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress

HELLO_S = 5.0
CONNECT_S = 5.0
T = TypeVar("T")
# Without jitter, which is up to a second by default.
RETRY = backoffPolicy(initialDelay=0.05, maxDelay=1.0, factor=2.0, jitter=lambda: 0.0)


@implementer(IPushProducer)
class TwistedConnection(Protocol):
    """A connection. `welcomed` fires with the connection itself.

    `frames` gets the replies that no Deferred of `request` waits for.
    """

    transport: Any  # Twisted's, without types

    def __init__(
        self,
        reactor: Reactor,
        conversation: Conversation,
        frames: Callable[[Sequence[Frame]], None],
    ) -> None:
        self._reactor = reactor
        self._frames = frames
        self._waiting: dict[int, Deferred[bytes]] = {}
        self._hello_timeout: DelayedCall | None = None
        self.conversation = conversation
        self.last_received = 0.0  # or the moment since which a reply is due
        self.write_paused = False  # the transport has enough unsent bytes
        self.on_drained: Callable[[], None] | None = None
        self.welcomed: Deferred[TwistedConnection] = Deferred()
        self.lost: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self._tcp: TcpTransport = self.transport
        self._tcp.setTcpNoDelay(True)
        # tests have transports without a socket
        below = getattr(self.transport, "transport", self.transport)  # of TLS
        if (handle := getattr(below, "getHandle", None)) is not None:
            notice_lost_peer(handle(), socket)
        self._tcp.registerProducer(self, streaming=True)
        self._hello_timeout = self._reactor.callLater(HELLO_S, self.abort)
        try:
            self.write(self.conversation.hello())
        # Another connection is registering the client's producer instance.
        except BrokerUnavailable as error:
            self._fail(error)
            self.abort()

    def write(self, pieces: Iterable[bytes]) -> None:
        """Send bytes of the conversation."""
        self._tcp.writeSequence(pieces)

    def request(self, opcode: int, payload: Payload = b"") -> Deferred[bytes]:
        """Return the payload of the reply.

        Fails with RequestRejected or ConnectionLost. Raises MessageTooLarge.
        """
        correlation, pieces = self.conversation.request(opcode, payload)
        reply: Deferred[bytes] = Deferred(partial(self._forget, correlation))
        self._waiting[correlation] = reply
        self.write(pieces)
        return reply

    def _forget(self, correlation: int, cancelled: Deferred[bytes]) -> None:
        del cancelled
        self._waiting.pop(correlation, None)

    def dataReceived(self, data: bytes) -> None:
        self.last_received = self._reactor.seconds()
        greeted = self.conversation.welcome is not None
        try:
            frames = self.conversation.receive(data)
        except TxmqError as error:
            self._fail(error)
            self.abort()
            return
        if self.conversation.outgoing:
            self.write(self.conversation.take_outgoing())
        if not greeted and self.conversation.welcome is not None:
            self._cancel_hello_timeout()
            self.welcomed.callback(self)
        others = [frame for frame in frames if not self._answer(frame)]
        if others:
            self._frames(others)

    def _answer(self, frame: Frame) -> bool:
        reply = self._waiting.pop(frame.correlation, None)
        if reply is None:
            return False
        try:
            payload = reply_payload(frame)
        except TxmqError as error:
            reply.errback(error)
        else:
            reply.callback(payload)
        return True

    def abort(self) -> None:
        """End the connection at once."""
        self._tcp.abortConnection()

    def end(self) -> None:
        """End the connection when everything is written."""
        self._tcp.unregisterProducer()  # TLS would wait for it
        self._tcp.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._cancel_hello_timeout()
        self.conversation.close()
        self._fail(ConnectionLost(f"the connection was lost: {reason.getErrorMessage()}"))
        self.lost.callback(None)

    def _fail(self, error: TxmqError) -> None:
        if not self.welcomed.called:
            self.welcomed.errback(error)
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            reply.errback(ConnectionLost(error.message))

    def _cancel_hello_timeout(self) -> None:
        if self._hello_timeout is not None and self._hello_timeout.active():
            self._hello_timeout.cancel()

    def pauseProducing(self) -> None:
        self.write_paused = True

    def resumeProducing(self) -> None:
        self.write_paused = False
        if self.on_drained is not None:
            self.on_drained()

    def stopProducing(self) -> None:
        """Ignored: `connectionLost` follows."""


@implementer(IStreamClientEndpoint)
class FirstAddressEndpoint:
    """An endpoint that tries addresses in turn."""

    def __init__(self, reactor: Reactor, addresses: Sequence[Address]) -> None:
        self._endpoints = [
            HostnameEndpoint(reactor, address.host, address.port, CONNECT_S)
            for address in addresses
        ]
        tls = getattr(addresses, "tls", None)
        if tls is not None:
            # programs without TLS need not have it
            from txmq.client.twisted.tls import encrypted  # noqa: PLC0415

            pairs = zip(self._endpoints, addresses, strict=True)
            self._endpoints = [
                encrypted(reactor, endpoint, tls, address) for endpoint, address in pairs
            ]

    def connect(
        self,
        protocolFactory: IProtocolFactory,  # noqa: N803  # the interface's name
    ) -> Deferred[IProtocol]:
        """Connect to the first address that answers. Fails with the last error."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        for endpoint in self._endpoints[:-1]:
            try:
                return await endpoint.connect(factory)
            except (ConnectError, OSError):
                continue
        return await self._endpoints[-1].connect(factory)


class _ConnectionFactory(Factory):
    noisy = False

    def __init__(self, make: Callable[[], TwistedConnection]) -> None:
        self._make = make

    def buildProtocol(self, addr: IAddress | None) -> TwistedConnection:
        del addr
        return self._make()


class PersistentConnection:
    """A connection that reconnects whenever it is lost.

    `attach` is called with each connection once it is welcomed. `refused` is called
    with an error that no other attempt can avoid, such as another log.
    """

    # Twisted's ClientService takes a connection that is lost before its preparation
    # ends for a bug of the machine, and logs a traceback each time.

    def __init__(
        self,
        reactor: Reactor,
        addresses: Sequence[Address],
        make: Callable[[], TwistedConnection],
        attach: Callable[[TwistedConnection], None],
        refused: Callable[[TxmqError], None] | None = None,
    ) -> None:
        self._reactor, self._attach, self._refused = reactor, attach, refused
        self.error: TxmqError | None = None  # of the last attempt
        self._failure: Exception | None = None  # likewise, whatever it was
        self._is_encrypted = getattr(addresses, "tls", None) is not None
        self._endpoint = FirstAddressEndpoint(reactor, addresses)
        # mypy does not know zope's interfaces.
        self._factory = cast("IProtocolFactory", _ConnectionFactory(make))
        self._link: TwistedConnection | None = None
        self._waiting: list[Deferred[TwistedConnection]] = []
        self._stopped = False
        self._ended = Deferred.fromCoroutine(self._run())

    async def _run(self) -> None:
        failed = 0
        while not self._stopped:
            link = await self._connect()
            if link is not None:
                self._link = link
                while self._waiting:
                    self._waiting.pop(0).callback(link)
                await link.lost
                self._link, failed = None, 0
            failed += 1
            if not self._stopped:
                with suppress(CancelledError):  # stopped
                    await deferLater(self._reactor, RETRY(failed))

    async def _connect(self) -> TwistedConnection | None:
        """Return a welcomed connection; None after a failed attempt."""
        link: TwistedConnection | None = None
        try:
            link = cast("TwistedConnection", await self._endpoint.connect(self._factory))
            await link.welcomed
            self.error = self._failure = None
            self._attach(link)
        except Exception as error:  # noqa: BLE001  # whatever it was, it is tried again
            if link is not None:
                link.abort()
            self._failure = error
            self.error = error if isinstance(error, TxmqError) else None
            if self._refused is not None and self.error is not None and is_final(self.error):
                self._refused(self.error)
            return None
        return link

    async def wait_connected(self, seconds: float) -> TwistedConnection:
        """Return the connection, as soon as there is one.

        Raises BrokerUnavailable after so many `seconds`, or a permanent error at once.
        """
        if self.error is not None and not self.error.retriable:
            raise self.error
        if self._link is not None:
            return self._link
        waiter: Deferred[TwistedConnection] = Deferred(self._waiting.remove)
        self._waiting.append(waiter)
        waiter.addTimeout(
            max(seconds, 0.001), self._reactor, lambda *_: Failure(self._no_answer(seconds))
        )
        return await waiter

    def _no_answer(self, seconds: float) -> BrokerUnavailable:
        last = {} if self._failure is None else {"": self._failure}
        return no_answer(seconds, last, encrypted=self._is_encrypted)

    async def stop(self) -> None:
        """End the connection, and make no other."""
        self._stopped = True
        while self._waiting:
            self._waiting.pop(0).errback(CancelledError())
        if self._link is not None:
            self._link.end()
        elif not self._ended.called:
            self._ended.cancel()
        await self._ended


def with_timeout(
    reactor: Reactor, deferred: Deferred[T], seconds: float, error: TxmqError
) -> Deferred[T]:
    """Return the Deferred, which fails with `error` after so many seconds."""
    deferred.addTimeout(max(seconds, 0.001), reactor, lambda _result, _seconds: Failure(error))
    return deferred


def none_on_timeout(result: object, _seconds: float) -> object:
    """Return None after a time-out, for `addTimeout`; a result of the same moment
    stays.
    """
    return None if isinstance(result, Failure) and result.check(CancelledError) else result


def is_final(error: TxmqError) -> bool:
    """Return whether no other connection can avoid the error.

    A protocol error is not final: it may have been an accident.
    """
    return not error.retriable and not isinstance(error, ProtocolError)


def request_timeout(seconds: float) -> RequestTimeout:
    """Return the error of a request without a reply."""
    return RequestTimeout(
        f"no reply within {seconds:.3g} s", hint="the request may have been carried out"
    )
