"""A network with latency, in which data comes in pieces and connections break."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.protocol import connectionDone

from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame, FrameDecoder, encode_frame
from txmq.wire.hello import Hello
from txmq.wire.status import to_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random
    from typing import Any

    from tests.simulation.clock import SimulatedClock
    from txmq.broker.reactor.protocol import ClientSession

LATENCY_S = 0.004
REQUEST_S = 2.0  # a client waits so long for a reply


class RequestLost(Exception):  # it is what happened
    """The connection broke, or no reply came in time. The broker may have carried the
    request out.
    """


class Listener(Protocol):
    """A broker that accepts connections."""

    def accept(self, client: ClientConnection) -> SimulatedConnection: ...


class SimulatedConnection:
    """One TCP connection, as the transport of the broker.

    Data of each direction arrives in order, later, and perhaps in two pieces.
    """

    def __init__(
        self, clock: SimulatedClock, rng: Random, session: ClientSession, client: ClientConnection
    ) -> None:
        self._clock, self._rng, self._session, self._client = clock, rng, session, client
        self._arrives = [0.0, 0.0]
        self.connected = 1
        session.makeConnection(self)  # type: ignore[no-untyped-call]  # a transport by what it can do

    def to_server(self, data: bytes) -> None:
        self._carry(0, data, self._session.dataReceived)

    def write(self, data: bytes) -> None:
        self._carry(1, data, self._client.received)

    def writeSequence(self, data: Iterable[bytes]) -> None:  # noqa: N802  # Twisted's
        self.write(b"".join(data))

    def _carry(self, way: int, data: bytes, deliver: Callable[[bytes], None]) -> None:
        rng, now, at = self._rng.random, self._clock.seconds(), self._arrives[way]
        cut = self._rng.randrange(len(data) + 1) if rng() < 0.1 else len(data)
        for piece in (data[:cut], data[cut:]):
            soonest = now + rng() * LATENCY_S
            at = max(at, soonest)
            if piece:
                self._clock.callLater(at - now, self._arrive, deliver, piece)
        self._arrives[way] = at

    def _arrive(self, deliver: Callable[[bytes], None], piece: bytes) -> None:
        if self.connected:
            deliver(piece)

    def cut(self) -> None:
        """End the connection for both sides; data on its way is lost."""
        if self.connected:
            self.connected = 0
            self._session.connectionLost(connectionDone)
            self._client.disconnected()

    def vanish(self) -> None:
        """End the connection for the client, after a crash of the broker."""
        self.connected = 0
        self._client.disconnected()

    loseConnection = abortConnection = cut

    def setTcpNoDelay(self, enabled: bool) -> None: ...  # noqa: FBT001
    def getPeer(self) -> str:
        return "simulated"

    def registerProducer(self, producer: object, streaming: bool) -> None: ...  # noqa: FBT001
    def pauseProducing(self) -> None: ...
    def resumeProducing(self) -> None: ...


class ClientConnection:
    """The client side of a connection: it sends requests, and matches the replies to
    them.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        rng: Random,
        broker: Callable[[], Listener | None],
        service: str = "sim",
    ) -> None:
        self._clock, self._rng, self._broker, self._service = clock, rng, broker, service
        self.transport: SimulatedConnection | None = None
        self.identity: dict[str, Any] = {}  # of the hello, besides the service
        self.welcome: Any = None
        self._replies: dict[int, Deferred[Frame]] = {}
        self._next = 0

    async def connect(self) -> None:
        """Connect again and again until a broker answers the hello."""
        while True:
            broker = self._broker()
            if broker is not None:
                self._decoder = FrameDecoder(1 << 25)
                self.transport = broker.accept(self)
                try:
                    hello = Hello(
                        versions=(1, 1), client="sim", service=self._service, **self.identity
                    )
                    self.welcome = json.loads(await self.request(Opcode.HELLO, hello.encode()))
                except RequestLost:
                    pass
                else:
                    return
            await self.pause(0.02)

    async def pause(self, seconds: float) -> None:
        done: Deferred[None] = Deferred()
        self._clock.callLater(seconds * (0.5 + self._rng.random()), done.callback, None)
        await done

    async def request(
        self, opcode: int, payload: bytes | list[bytes], wait_s: float = REQUEST_S
    ) -> bytes:
        """Return the payload of the reply. Raises RequestLost, or the error that the
        broker sent.
        """
        if self.transport is None:
            raise RequestLost
        self._next += 1
        number, reply = self._next, Deferred[Frame]()
        self._replies[number] = reply
        timer = self._clock.callLater(wait_s, self._too_late, number)
        self.transport.to_server(encode_frame(opcode, number, payload))
        frame = await reply
        if timer.active():
            timer.cancel()
        if frame.status:
            raise to_error(frame.status, frame.payload)
        return frame.payload

    async def call(self, name: str, /, **args: Any) -> Any:
        return json.loads(await self.request(Opcode.CALL, encode_call(name, args)))

    def _too_late(self, number: int) -> None:
        if number in self._replies and self.transport is not None:
            self.transport.cut()

    def received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            reply = self._replies.pop(frame.correlation, None)
            if reply is not None:
                reply.callback(frame)

    def disconnected(self) -> None:
        self.transport = None
        waiting, self._replies = self._replies, {}
        for reply in waiting.values():
            reply.errback(RequestLost())

    def drop(self) -> None:
        """End the connection, as the death of the client's process does."""
        if self.transport is not None:
            self.transport.cut()
