"""A broker without a process: its sessions are fed bytes, its disk and clock are simulated."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from tests.simulation.node import SEGMENT
from txmq import errors
from txmq.batch import encode
from txmq.broker.assembly import Assembly
from txmq.broker.core import machine
from txmq.broker.core.tables import MemoryTables
from txmq.broker.engine import Engine
from txmq.config import load
from txmq.message import Message
from txmq.store.log import Log
from txmq.testing.simfs import SimFS
from txmq.wire import headers
from txmq.wire.calls import encode_call
from txmq.wire.frames import Frame, FrameDecoder, encode_frame
from txmq.wire.headers import Opcode
from txmq.wire.hello import Hello
from txmq.wire.json import parse
from txmq.wire.status import to_error

SECOND = 1_000_000
BEGAN = 1_700_000_000 * SECOND
HELLO = encode_frame(Opcode.HELLO, 1, Hello(versions=(1, 1), client="test", service="s").encode())


class Nobody:
    """No database at all."""

    def knows(self, decider: tuple[object, ...]) -> bool:
        return decider[0] != "postgres"

    def ask(self, token: bytes, row: object, answered: object) -> None:
        raise AssertionError("nobody knows")


class Broker:
    """A broker whose disk and clock are simulated."""

    def __init__(self) -> None:
        self.clock = Clock()
        log, _ = Log.open(SimFS(), "/data", now=1, segment_size=SEGMENT, preallocate=4096)
        state = machine.load(MemoryTables())
        self.engine = Engine(log, state, clock=self.clock, now=self.now, in_thread=self._at_once)
        self.engine.boot("test")
        settings = load(None, {"data": "/data"})
        self._assembly = Assembly(self.engine, settings, self.clock, Nobody(), Random(1))

    def start(self) -> None:
        """Begin the timers."""
        self._assembly.start(Failure.raiseException)

    def now(self) -> int:
        """Microseconds since the epoch."""
        return BEGAN + int(self.clock.seconds() * SECOND)

    def _at_once(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        return execute(function, *args)

    def connect(self, hello: bytes | None = HELLO) -> Client:
        """A new connection; None = one that has not greeted."""
        client = Client(self)
        if hello is not None:
            client.send(hello)
            client.replies()
        return client

    def protocol(self) -> object:
        return self._assembly.sessions.buildProtocol(None)


class Client:
    """The other end of one connection."""

    def __init__(self, broker: Broker) -> None:
        self.broker, self.session = broker, broker.protocol()
        self.transport = StringTransport()
        self.transport.setTcpNoDelay = lambda _enabled: None  # type: ignore[attr-defined]
        self.session.makeConnection(self.transport)  # type: ignore[attr-defined]

    def send(self, data: bytes) -> None:
        self.session.dataReceived(data)  # type: ignore[attr-defined]
        self.broker.clock.advance(0)
        self.broker.clock.advance(0)

    def ask(self, opcode: int, payload: bytes, correlation: int = 7) -> Frame:
        self.send(encode_frame(opcode, correlation, payload))
        [reply] = self.replies()
        return reply

    def call(self, name: str, /, **args: object) -> object:
        return parse(self.ask(Opcode.CALL, encode_call(name, args)).payload)

    def replies(self) -> list[Frame]:
        data = self.transport.value()
        self.transport.clear()
        return FrameDecoder(1 << 25).feed(data)

    def refusal(self) -> errors.TxmqError:
        [reply] = self.replies()
        return to_error(reply.status, reply.payload)

    @property
    def closed(self) -> bool:
        return self.transport.disconnecting or self.transport.disconnected


def send_payload(sequence: int = 0, topic: str = "t", partition: int = 0) -> bytes:
    batch = encode([Message(b"m")], producer_id=b"p" * 16, epoch=0, sequence=sequence, born_at=1)
    return headers.send_header(topic, partition, 0) + batch
