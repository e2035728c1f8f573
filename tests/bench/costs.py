"""What operations cost, in counts: calls, writes, statements and round trips.

    python -m tests.bench.costs [--only NAME] [--functions]

The counts are exact, so `tests/test_costs.py` holds them in `make test`. Calls are
those of txmq's own Python functions and of code that Python generates for its classes,
as the caller's thread makes them. Coroutines count when they begin: how often they
wait is the loop's. Work of other threads is done in this one, too. What Twisted,
drivers and the standard library call is not counted: that depends on their versions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dis import opmap
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from threading import Event, current_thread
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import psycopg
import psycopg2

import txmq
import txmq.aio
from tests.bench.inline_broker import InlineBroker, StillClock
from tests.bench.relayed_database import Sent, relayed
from tests.fixtures_postgres import create_database
from txmq.client.blocking.client import Client
from txmq.client.blocking.connections.stream import NonBlockingConnection
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.client.blocking.consumer.inbox import Inbox, InboxWorker
from txmq.client.blocking.consumer.members import ThreadedMembers
from txmq.client.protocol.consumer.handlers import handler_options
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.consumer.settings import consumer_settings
from txmq.core.topics.topics import CreateTopic
from txmq.model.causation import caused_by
from txmq.model.message import NO_HEADERS, ReceivedMessage, message_id
from txmq.model.units import SECOND
from txmq.testing.postgres_server import any_server


class Cost(NamedTuple):
    """The cost of one operation.

    `writes` are those of the client to its broker, `trips` the round trips to
    PostgreSQL.
    """

    client: int
    broker: int
    writes: int
    statements: int
    trips: int


AT_ONCE: Final = 64
# client, broker, writes, statements, trips
COSTS: Final[dict[str, Cost]] = {
    "one send": Cost(31, 101, 1, 0, 0),
    "one send of a handler": Cost(36, 126, 1, 0, 0),
    "64 outstanding sends": Cost(892, 345, 3, 0, 0),
    "half message and commit": Cost(146, 246, 2, 0, 0),
    "row and message": Cost(213, 255, 2, 4, 4),
    "row and message, asyncio": Cost(333, 255, 2, 4, 4),
    "64 acked messages": Cost(1354, 230, 2, 0, 0),
    "64 messages with an inbox": Cost(6112, 230, 2, 448, 129),
}

BODY: Final = bytes(256)
CAUSE: Final = ReceivedMessage(
    "bench", 0, 0, None, None, NO_HEADERS, BODY, message_id(bytes(16), 1), 1, 0, 0
)
TABLE: Final = "CREATE TABLE bench_costs (id bigserial PRIMARY KEY, body text NOT NULL)"
INSERT: Final = "INSERT INTO bench_costs (body) VALUES ('one')"
WITHIN_S: Final = 10.0
TURNS: Final = 4  # of a loop: what is written in one has its answer in the next
WARM_UP: Final = 3  # what is asked once, and caches
ROOT: Final = f"{Path(txmq.__file__).parent}/"
NOT_COUNTED: Final = f"{ROOT}testing/"
GENERATED: Final = "<string>"  # of NamedTuples and dataclasses
INLINED: Final = ("<listcomp>", "<dictcomp>", "<setcomp>")  # by later versions of Python
SUSPENDS: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
RESUME: Final = opmap["RESUME"]


class Calls:
    """Counts the calls of functions, as the profile function of a thread."""

    def __init__(self) -> None:
        self.of: Counter[tuple[str, str]] = Counter()  # by side and function
        self._side = "client"
        # None = not counted; of a generator the place where it begins, else -1
        self._begins: dict[CodeType, int | None] = {}

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename == GENERATED:  # equal where the fields of two classes are
            if name := _made(frame):
                self.of[self._side, name] += 1
            return
        try:
            begins = self._begins[code]
        except KeyError:
            begins = self._begins[code] = _begins(code)
        if begins is not None and begins in (-1, frame.f_lasti):
            self.of[self._side, _name(code)] += 1

    @contextmanager
    def on_broker(self) -> Iterator[None]:
        """Count what is called in the block as the broker's."""
        before, self._side = self._side, "broker"
        try:
            yield
        finally:
            self._side = before

    def on(self, side: str) -> int:
        """Return the number of calls on a side."""
        return sum(count for (where, _name), count in self.of.items() if where == side)


def _made(frame: FrameType) -> str:
    """Return the class of txmq's whose generated code runs; "" = another one's."""
    first: object = next(iter(frame.f_locals.values()), None)
    kind = first if isinstance(first, type) else type(first)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.startswith("txmq.") else ""


def _begins(code: CodeType) -> int | None:
    name = code.co_filename
    counted = name.startswith(ROOT) and not name.startswith(NOT_COUNTED)
    if not counted or code.co_name in INLINED:
        return None
    if not code.co_flags & SUSPENDS:
        return -1
    resumes = (at for at in range(0, len(code.co_code), 2) if code.co_code[at] == RESUME)
    return next(at for at in resumes if code.co_code[at + 1] & 3 == 0)


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(ROOT)}:{code.co_qualname}"


class World:
    """What an operation works on: a broker, a client of it, and a database."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.calls, self.clock, self.sent = Calls(), StillClock(), Sent()
        self.broker = InlineBroker(self.calls.on_broker)
        self.broker.memory.clock.advance(time.time() - self.broker.memory.now() / SECOND)
        self.broker.memory.do(CreateTopic("bench", 1))
        self.client: Client = txmq.connect("txmq://inline:1", service="bench")
        self.client._core.answer_checks = lambda: None  # a thread of its own, once a client

    @contextmanager
    def connected(self, connect: Callable[[str], Any]) -> Iterator[Any]:
        """Return a connection whose statements count."""
        with relayed(self.dsn) as (dsn, self.sent), closing(connect(dsn)) as connection:
            yield connection

    def count(self, operation: Callable[[], object], prepare: Callable[[], object]) -> Cost:
        """Return what an operation costs, behind its preparation."""
        prepare()
        self.calls.of.clear()
        sent, writes = (self.sent.statements, self.sent.trips), self.broker.writes
        gc.collect()
        gc.disable()  # it would call finalizers in the middle
        sys.setprofile(self.calls)
        try:
            operation()
        finally:
            sys.setprofile(None)
            gc.enable()
        return Cost(
            self.calls.on("client"),
            self.calls.on("broker"),
            self.broker.writes - writes,
            self.sent.statements - sent[0],
            self.sent.trips - sent[1],
        )


class Work(NamedTuple):
    """An operation, and what has to be done before each."""

    operation: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def one_send(world: World) -> Iterator[Work]:
    yield Work(lambda: world.client.send("bench", BODY))


def send_of_a_handler(world: World) -> Iterator[Work]:
    with caused_by(CAUSE):
        yield Work(lambda: world.client.send("bench", BODY))


def outstanding_sends(world: World) -> Iterator[Work]:
    def send() -> None:
        futures = [world.client.send_async("bench", BODY) for _ in range(AT_ONCE)]
        for future in futures:
            future.result(WITHIN_S)

    # this thread does the work of the sender's
    core = world.client._core
    sender, connection = core.sender, NonBlockingConnection(core.open_connection(_deadline()))
    sender._thread, sender._caller_io.connection = current_thread(), connection
    sender._accumulator.sleep_if_idle(can_send=True)
    yield Work(send)
    sender._thread = sender._caller_io.connection = None
    connection.abort()


def half_and_commit(world: World) -> Iterator[Work]:
    def transact() -> None:
        with world.client.transaction(checker="bench") as transaction:
            transaction.send("bench", BODY)
            transaction.prepare()

    yield Work(transact)


def row_and_message(world: World) -> Iterator[Work]:
    with world.connected(psycopg2.connect) as connection:

        def transact() -> None:
            with world.client.transaction(connection) as transaction, connection.cursor() as cursor:
                cursor.execute(INSERT)
                transaction.send("bench", BODY)

        yield Work(transact)


def row_and_message_on_asyncio(world: World) -> Iterator[Work]:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[tuple[txmq.aio.Client, Any]]:
        async with (
            txmq.aio.connect("txmq://inline:1", service="bench") as client,
            await psycopg.AsyncConnection.connect(dsn) as connection,
        ):
            yield client, connection

    async def transact(client: txmq.aio.Client, connection: Any) -> None:
        async with client.transaction(connection) as transaction:
            await connection.execute(INSERT)
            transaction.send("bench", BODY)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    with relayed(world.dsn) as (dsn, world.sent), asyncio.Runner() as runner:
        block = opened(dsn)
        client, connection = runner.run(block.__aenter__())
        try:
            yield Work(lambda: runner.run(transact(client, connection)))
        finally:
            runner.run(block.__aexit__(None, None, None))


class Members:
    """A consumer whose member is driven by the thread that uses it."""

    def __init__(self, world: World, group: str) -> None:
        self._world = world
        core, settings = world.client._core, consumer_settings(group, ["bench"], start="last")
        self.members = ThreadedMembers([core], settings)
        [self.member] = self.members.members
        self._connection = NonBlockingConnection(core.open_connection(_deadline()))
        self._in_flight: dict[int, tuple[Request, float]] = {}
        with self.members.changed:
            self.member.member.connected(time.monotonic())
        self.drive()

    def drive(self) -> None:
        """Send and receive what there is, as its thread does."""
        thread = self.member.thread
        while True:
            writes = self._world.broker.writes
            thread._send(self._connection, self._in_flight, time.monotonic())
            frames = self._connection.read()
            thread._receive(frames, self._in_flight)
            if not frames and self._world.broker.writes == writes:
                return

    def ack(self) -> None:
        """Send the acks that have waited for one another."""
        self._world.clock.advance(1.0)
        self.drive()

    def fill(self) -> None:
        """Send messages for the operation."""
        self._world.client.send_many("bench", [BODY] * AT_ONCE)

    def close(self) -> None:
        """Leave the group to its session."""
        self._connection.abort()
        self.member.thread._wakes.close()
        self.member.thread._waker.close()


def acked_messages(world: World) -> Iterator[Work]:
    members = Members(world, "acked")

    def consume() -> None:
        members.drive()
        for _ in range(AT_ONCE):
            message = consumer.receive(0.0)
            assert message is not None, "it was fetched"
            consumer.ack(message)
        members.ack()

    consumer = Consumer(members.members)
    yield Work(consume, members.fill)
    members.close()


def _unexpected(error: BaseException) -> None:
    raise error


def inbox_messages(world: World) -> Iterator[Work]:
    with world.connected(psycopg2.connect) as connection:
        members = Members(world, "inbox")

        def handle(_message: object, connection: Any) -> None:
            with connection.cursor() as cursor:
                cursor.execute(INSERT)

        inboxes = {members.member.owner: Inbox(members.member, lambda: connection, _unexpected)}
        options = handler_options(1, None, 0.0, None)
        worker = InboxWorker(members.members, inboxes, handle, lambda: connection, options, Event())

        def consume() -> None:
            members.drive()
            worker(members.members.receive_many(1, 0.0))
            members.ack()

        yield Work(consume, members.fill)
        members.close()


OPERATIONS: Final[dict[str, Callable[[World], Iterator[Work]]]] = {
    "one send": one_send,
    "one send of a handler": send_of_a_handler,
    "64 outstanding sends": outstanding_sends,
    "half message and commit": half_and_commit,
    "row and message": row_and_message,
    "row and message, asyncio": row_and_message_on_asyncio,
    "64 acked messages": acked_messages,
    "64 messages with an inbox": inbox_messages,
}


def _deadline() -> float:
    return time.monotonic() + WITHIN_S


def counted(dsn: str, name: str) -> tuple[Cost, Calls]:
    """Return the cost of an operation, and its calls.

    `dsn` names a database with txmq's tables.
    """
    world = World(dsn)
    with world.broker.dialled(), world.clock.running(), closing(world.client):
        _report(world)
        with contextmanager(OPERATIONS[name])(world) as work:
            for _ in range(WARM_UP):
                cost = world.count(*work)
    return cost, world.calls


def _report(world: World) -> None:
    """Make the table, and have the broker known there, as its own report would."""
    memory = world.broker.memory
    with (
        closing(psycopg2.connect(world.dsn)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(TABLE)
        cursor.execute(
            "INSERT INTO txmq_broker (log_id, name, reported_at, boot_epoch)"
            " VALUES (%s, 'bench', now(), %s)",
            (str(memory.log.log_id), memory.engine.state.boot_epoch),
        )
        # as its look at the outbox does
        cursor.execute("SELECT txmq_outbox_settle(%s)", (str(memory.log.log_id),))


def main(arguments: list[str]) -> None:
    """Print the counts as lines of COSTS, and with --functions the calls of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="operations whose names begin so")
    parser.add_argument("--functions", action="store_true", help="the calls of each function")
    options = parser.parse_args(arguments)
    chosen = [name for name in OPERATIONS if name.startswith(options.only)]
    if not chosen:
        parser.error(f"no operation begins with {options.only!r}: {', '.join(OPERATIONS)}")
    print("    #", ", ".join(Cost._fields))
    with any_server(fsync=False) as server:
        for name in chosen:
            cost, calls = counted(server.dsn(create_database(server)), name)
            print(f'    "{name}": Cost{tuple(cost)},')
            for (side, function), count in calls.of.most_common() if options.functions else ():
                print(f"{count:6} {side} {function}")


if __name__ == "__main__":
    main(sys.argv[1:])
