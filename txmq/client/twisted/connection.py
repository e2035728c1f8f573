"""One connection of the Twisted face, and how there is always one: Deferreds around the
sans-I/O conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from twisted.application.internet import ClientService, backoffPolicy
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
from txmq.client.protocol.conversation import Conversation, Payload, result
from txmq.client.twisted.protocols import Reactor, Timer, Transport
from txmq.errors import BrokerUnavailable, ConnectionLost, ProtocolError, RequestTimeout, TxmqError
from txmq.wire.frames import Frame

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress

HELLO_S = 5.0
CONNECT_S = 5.0
T = TypeVar("T")
RETRY = backoffPolicy(
    initialDelay=0.05, maxDelay=1.0, factor=2.0, jitter=lambda: 0.0
)  # by default up to a second


@implementer(IPushProducer)
class Link(Protocol):
    """A connection. `welcomed` fires with the link itself; `frames` gets the replies
    that nobody waits for here.
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
        self._hello: Timer | None = None
        self.conversation = conversation
        self.heard = 0.0  # when the broker last said something
        self.full = False  # of bytes that the kernel does not take
        self.drained: Callable[[], None] | None = None
        self.welcomed: Deferred[Link] = Deferred()
        self.lost: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self._wire: Transport = self.transport
        self._wire.setTcpNoDelay(True)
        self._wire.registerProducer(self, streaming=True)
        self._hello = self._reactor.callLater(HELLO_S, self.abort)
        try:
            self.write(self.conversation.hello())
        except (
            BrokerUnavailable
        ) as error:  # another connection is registering the client's instance
            self._fail(error)
            self.abort()

    def write(self, pieces: Iterable[bytes]) -> None:
        """Sends bytes that the conversation made."""
        self._wire.writeSequence(pieces)

    def request(self, opcode: int, payload: Payload = b"") -> Deferred[bytes]:
        """The payload of the reply. Fails with RequestRejected, ConnectionLost,
        MessageTooLarge.
        """
        correlation, pieces = self.conversation.request(opcode, payload)
        reply: Deferred[bytes] = Deferred(partial(self._forget, correlation))
        self._waiting[correlation] = reply
        self.write(pieces)
        return reply

    def _forget(self, correlation: int, cancelled: Deferred[bytes]) -> None:
        """Nobody waits for the reply any more."""
        del cancelled
        self._waiting.pop(correlation, None)

    def dataReceived(self, data: bytes) -> None:
        self.heard = self._reactor.seconds()
        greeted = self.conversation.welcome is not None
        try:
            frames = self.conversation.receive(data)
        except TxmqError as error:
            self._fail(error)
            self.abort()
            return
        if not greeted and self.conversation.welcome is not None:
            self._stop_waiting()
            self.welcomed.callback(self)
        others = [frame for frame in frames if not self._answer(frame)]
        if others:
            self._frames(others)

    def _answer(self, frame: Frame) -> bool:
        reply = self._waiting.pop(frame.correlation, None)
        if reply is None:
            return False
        try:
            payload = result(frame)
        except TxmqError as error:
            reply.errback(error)
        else:
            reply.callback(payload)
        return True

    def abort(self) -> None:
        """Ends the connection at once."""
        self._wire.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._stop_waiting()
        self.conversation.end()
        self._fail(ConnectionLost(f"the connection was lost: {reason.getErrorMessage()}"))
        self.lost.callback(None)

    def _fail(self, error: TxmqError) -> None:
        if not self.welcomed.called:
            self.welcomed.errback(error)
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            reply.errback(ConnectionLost(error.message))

    def _stop_waiting(self) -> None:
        if self._hello is not None and self._hello.active():
            self._hello.cancel()

    def pauseProducing(self) -> None:
        self.full = True

    def resumeProducing(self) -> None:
        self.full = False
        if self.drained is not None:
            self.drained()

    def stopProducing(self) -> None:
        """The connection is over, which `connectionLost` says as well."""


@implementer(IStreamClientEndpoint)
class AnyOf:
    """An endpoint that tries addresses in turn."""

    def __init__(self, reactor: Reactor, addresses: Sequence[Address]) -> None:
        self._endpoints = [
            HostnameEndpoint(reactor, address.host, address.port, CONNECT_S)
            for address in addresses
        ]

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # the interface's name
        """A connection to the first address that answers. Fails as the last one did."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        for endpoint in self._endpoints[:-1]:
            try:
                return await endpoint.connect(factory)
            except (ConnectError, OSError):
                continue
        return await self._endpoints[-1].connect(factory)


class _Links(Factory):
    noisy = False

    def __init__(self, make: Callable[[], Link]) -> None:
        self._make = make

    def buildProtocol(self, addr: IAddress | None) -> Link:
        del addr
        return self._make()


class Connected:
    """A connection that is made again whenever it is lost. `attach` is told of each,
    once it is welcomed.

    `refused` is told why the broker there will never do, such as another log: no other
    attempt will do better.
    """

    def __init__(
        self,
        reactor: Reactor,
        addresses: Sequence[Address],
        make: Callable[[], Link],
        attach: Callable[[Link], None],
        refused: Callable[[TxmqError], None] | None = None,
    ) -> None:
        self._reactor, self._attach, self._refused = reactor, attach, refused
        self.trouble: TxmqError | None = None  # what the last welcome failed with
        endpoint = cast(
            "IStreamClientEndpoint", AnyOf(reactor, addresses)
        )  # zope's interfaces are not mypy's
        factory = cast("IProtocolFactory", _Links(make))
        self._service = ClientService(
            endpoint, factory, RETRY, clock=reactor, prepareConnection=self._prepare
        )
        self._service.startService()

    def _prepare(self, link: Link) -> Deferred[Link]:
        def welcomed(link: Link) -> Link:
            self.trouble = None
            self._attach(link)
            return link

        def refused(failure: Failure) -> Failure:
            self.trouble = error = failure.value if isinstance(failure.value, TxmqError) else None
            if self._refused is not None and error is not None and will_never_do(error):
                self._refused(error)
            return failure

        return link.welcomed.addCallbacks(welcomed, refused)

    async def link(self, patience: float) -> Link:
        """The connection, as soon as there is one. Raises BrokerUnavailable, or why
        there will be none.
        """
        if self.trouble is not None and not self.trouble.retriable:
            raise self.trouble
        late = BrokerUnavailable(f"no broker answered within {patience} s")
        return cast(
            "Link", await timed(self._reactor, self._service.whenConnected(), patience, late)
        )

    async def stop(self) -> None:
        """Ends the connection, and makes no other."""
        await self._service.stopService()
        await deferLater(
            self._reactor, 0
        )  # out of its turn: within it, it cannot be asked to stop again


def timed(reactor: Reactor, waiting: Deferred[T], seconds: float, error: TxmqError) -> Deferred[T]:
    """`waiting`, which fails with `error` if it takes longer."""
    waiting.addTimeout(max(seconds, 0.001), reactor, lambda _result, _seconds: Failure(error))
    return waiting


def nothing(result: object, _seconds: float) -> object:
    """For `addTimeout`: None once the time is over; what came in the same moment is
    kept.
    """
    return None if isinstance(result, Failure) and result.check(CancelledError) else result


def will_never_do(error: TxmqError) -> bool:
    """Whether no other connection will do better; one that broke a rule of the protocol
    may be a mishap.
    """
    return not error.retriable and not isinstance(error, ProtocolError)


def too_late(seconds: float) -> RequestTimeout:
    """The error for a reply that did not come."""
    return RequestTimeout(
        f"no reply within {seconds} s", hint="the request may have been carried out"
    )
