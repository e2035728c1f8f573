"""A broker in memory and clients that are fed bytes. The test controls disk, clock and
databases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from uuid import UUID

import pytest
from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from tests.store.simfs import SimFS
from txmq import errors
from txmq.batch import encode, verify
from txmq.broker.assembly import Assembly
from txmq.broker.checkback.resolvers import LeaseStatus, Resolvers, ResolverStatus
from txmq.broker.engine.engine import Engine
from txmq.broker.monitoring.cluster_node import NodeNumbers
from txmq.broker.monitoring.liveness import Liveness
from txmq.broker.reactor.steady_clock import SteadyClock
from txmq.broker.service import BrokerParts
from txmq.config.broker import SettingsFile, load_broker
from txmq.core import machine
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.model.bundle import BundleReceipt
from txmq.model.cluster import ClusterView, NodeView
from txmq.model.decider import ByBroker, ByPostgres, DatabaseId, Decider
from txmq.model.message import Decision, Message
from txmq.model.units import SECOND
from txmq.store.log.log import Log
from txmq.store.log.writer import Flush
from txmq.store.tables import MemoryTables
from txmq.wire import data_requests
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame, FrameDecoder, encode_frame
from txmq.wire.hello import Hello, Welcome
from txmq.wire.json import parse
from txmq.wire.status import to_error

HELLO = encode_frame(Opcode.HELLO, 1, Hello(versions=(1, 1), client="test", service="s").encode())
BEGAN = 1_700_000_000 * SECOND
DATABASE = ByPostgres(1, 1, 5, 7, 1)
Answered = Callable[[bytes, Decision, str, str], None]


class NoResolvers:
    """Resolvers of a broker without databases."""

    def may_resolve(self, decider: Decider) -> bool:
        return decider.kind != "postgres"

    def left_behind(self, decider: ByPostgres) -> str:
        del decider
        return ""

    def resolve(self, token: bytes, row: object, answered: Answered) -> None:
        del row
        answered(token, Decision.UNKNOWN, "resolver", "no resolver is configured")

    def status(self) -> tuple[()]:
        return ()

    def lease_of(self, database: DatabaseId) -> LeaseStatus:
        del database
        return LeaseStatus(held=False, directory=None)

    def note_bundle(self, database: DatabaseId | ByPostgres) -> None:
        del database

    def reports(self) -> dict[DatabaseId, int]:
        return {}


class QuickDisk:
    """A disk that is never behind."""

    is_behind = False

    def has_room(self, size: int) -> bool:
        del size
        return True

    def seconds_for(self, size: int) -> float:
        del size
        return 0.0

    def answer_when_durable(self, deliver: Callable[[Any], None], reply: object) -> None:
        deliver(reply)

    def hurry(self) -> None:
        """There is nothing to hurry."""


class FakeResolver:
    """A resolver that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[bytes, Answered] = {}
        self.known = True  # whether it leads to the database that decides
        self.is_ahead = False  # of the servers of transactions, by a failover
        self.is_like: tuple[ResolverStatus, ...] = ()

    def status(self) -> Sequence[ResolverStatus]:
        return self.is_like

    def lease_of(self, database: DatabaseId) -> LeaseStatus:
        del database
        return LeaseStatus(held=False, directory=None)

    def note_bundle(self, database: DatabaseId | ByPostgres) -> None:
        del database

    def reports(self) -> dict[DatabaseId, int]:
        return {}

    def may_resolve(self, decider: Decider) -> bool:
        del decider
        return self.known

    def left_behind(self, decider: ByPostgres) -> str:
        del decider
        return "a failover has left that server behind" if self.is_ahead else ""

    def resolve(self, token: bytes, row: object, answered: Answered) -> None:
        assert token not in self.asked, "it is being asked already"
        self.asked[token] = answered

    def answer(self, token: bytes, answer: Decision, reason: str = "") -> None:
        self.asked.pop(token)(token, answer, "resolver shop", reason)


def at_once(function: Callable[..., Any], *args: object) -> Deferred[Any]:
    """Stand for a thread: the work is done when this returns."""
    return execute(function, *args)


class FakeNode:
    """A leader whose node is what the test says. `others` follow it."""

    def __init__(self) -> None:
        self.me = NodeView("n1", "127.0.0.1:7651", "leader", 3, 800, 0, 0.0, 0.0, "0.1.0")
        self.others = [self.me._replace(name="n2", address="127.0.0.1:7652", role="follower")]
        self.figures = NodeNumbers(True, 3, 0.1, 0.2, 4, 5)
        self.has_stepped_down = False

    def view(self) -> ClusterView:
        return ClusterView(str(UUID(int=7)), 3, "n1", (self.me, *self.others))

    def addresses(self) -> tuple[str, ...]:
        return (self.me.address, *(node.address for node in self.others))

    def numbers(self) -> NodeNumbers:
        return self.figures

    def step_down(self) -> None:
        self.has_stepped_down = True


class BrokerInMemory:
    """A broker whose disk and clock are simulated."""

    def __init__(
        self,
        resolving: Resolvers | None = None,
        settings: SettingsFile | None = None,
        cluster: FakeNode | None = None,
    ) -> None:
        self.clock = Clock()
        self.hanging: Deferred[None] | None = None  # what threads wait for
        self.fs = SimFS()
        self.log, _ = Log.open(self.fs, "/data", now=1, segment_size=16 << 20, preallocate=4096)
        state = machine.load(MemoryTables())
        self.wall_wrong = 0  # microseconds by which the machine's clock is ahead
        steady = SteadyClock(lambda: self.now() + self.wall_wrong, self.clock.seconds)
        self.engine = Engine(self.log, state, clock=self.clock, now=steady, in_thread=self._at_once)
        self.engine.boot("test")
        settings = settings or load_broker(None, {"data": "/data", "create_topics": True})
        self.cluster = cluster
        self.assembly = Assembly(
            self.engine,
            settings,
            self.clock,
            resolving or NoResolvers(),
            Random(1),
            steady,
            cluster,
        )

    def start(self) -> None:
        """Begin the timers."""
        self.assembly.start(Failure.raiseException)

    def now(self) -> int:
        """Return microseconds since the epoch."""
        return BEGAN + round(self.clock.seconds() * SECOND)

    def _at_once(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        if self.hanging is not None:
            return self.hanging.addCallback(lambda _: function(*args))
        return at_once(function, *args)

    def connect(self, hello: bytes | None = HELLO) -> Client:
        """Return a new connection; None = one without a hello."""
        client = Client(self)
        if hello is not None:
            client.send(hello)
            client.replies()
        return client

    def protocol(self) -> object:
        return self.assembly.sessions.accept()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with enough turns of the reactor for timers that depend on
        each other.
        """
        for _ in range(10):
            self.clock.advance(seconds / 10)

    def ask(self, name: str, /, **args: object) -> Any:
        """Return the reply to a call from this process: a dict, or the refusal."""
        replies: list[Any] = []
        self.assembly.calls.ask(name, args, replies.append)
        self.pass_time(0)
        [reply] = replies
        return reply

    def do(self, command: object) -> Any:
        """Return the core's reply to a command."""
        replies: list[Any] = []
        self.engine.submit(command, replies.append)
        self.pass_time(0)
        [reply] = replies
        return reply

    def token(self, number: int) -> bytes:
        return (self.now() // 1_000).to_bytes(6, "big") + number.to_bytes(10, "big")

    def half(
        self,
        number: int,
        *messages: Message,
        decider: Decider = DATABASE,
        sealed: bool = True,
        check_after: int = 6 * SECOND,
        wait: bool = True,
    ) -> str:
        """Store a transaction with each message as a batch of its own, in topic t.
        Return its token.
        """
        if "t" not in self.engine.state.topics:
            self.do(CreateTopic("t", 1))
        token = self.token(number)
        datas = [
            encode([message], producer_id=token, epoch=0, sequence=place, born_at=self.now())
            for place, message in enumerate(messages)
        ]
        return self.store(
            token, datas, decider=decider, sealed=sealed, check_after=check_after, wait=wait
        )

    def store(
        self,
        token: bytes,
        datas: Sequence[bytes],
        *,
        decider: Decider = DATABASE,
        sealed: bool = True,
        check_after: int = 6 * SECOND,
        wait: bool = True,
    ) -> str:
        """Store a transaction of these batches in topic t. Return its token."""
        batches = tuple(BundleBatch("t", 0, 0, data, verify(data)) for data in datas)
        digest, local = b"d" * 32 if sealed else bytes(32), decider == ByBroker()
        command = StorePart(
            token, 0, batches, sealed, local, digest, 0, decider, "shop", (), check_after
        )
        if wait:
            reply = self.do(command)
            assert isinstance(reply, BundleReceipt), reply
        else:
            self.engine.submit(command, lambda _reply: None)
        return token.hex()


class Client:
    """The client's end of one connection."""

    def __init__(self, broker: BrokerInMemory) -> None:
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
    return data_requests.send_header(topic, partition, 0) + batch


def welcome(broker: BrokerInMemory) -> Welcome:
    """Return the broker's reply to a hello."""
    client = broker.connect(None)
    client.send(encode_frame(Opcode.HELLO, 1, Hello(versions=(1, 1), client="test").encode()))
    [reply] = client.replies()
    return Welcome.parse(reply)


def writes(broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record the log's writes from now on: whether each was synced."""
    synced: list[bool] = []
    write = broker.log.write

    def noted(flush: Flush, *, sync: bool = True) -> None:
        synced.append(sync)
        write(flush, sync=sync)

    monkeypatch.setattr(broker.log, "write", noted)
    return synced


def parts_of(
    broker: BrokerInMemory,
    settings: SettingsFile,
    resolving: Any = None,  # of a test's own
) -> BrokerParts:
    """Return what an edge gets of a broker in memory."""
    assembly = broker.assembly
    return BrokerParts(
        broker.engine,
        assembly.calls,
        settings,
        assembly.listeners,
        assembly.alarms,
        resolving or NoResolvers(),
        broker.clock,
        Liveness(broker.engine, assembly.sessions, broker.clock),
        assembly.turns,
        assembly.guard,
        assembly.sessions.sends,
        cluster=broker.cluster,
    )
