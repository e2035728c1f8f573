"""The faces of the client, used alike: every call can be awaited.

A story is a coroutine that is the same for all of them. With the blocking face it never
waits, as each call has ended before it is awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import psycopg
import psycopg2
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

import txmq.aio
import txmq.twisted
from tests.client.aio import running
from tests.client.reactor_thread import make_in_reactor
from tests.client.real_consumers import is_drained
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.testing.wait import PATIENCE_S

Story = Coroutine[Any, Any, Any]
Handler = Callable[..., Story]
PAUSE_S = 0.02
Values = tuple[object, ...]
NOUNS = ("txmq.client.blocking", HalfMessage.__module__)  # of the blocking face


class Called:
    """An object of the blocking face, or what a call has returned."""

    def __init__(self, bare: Any) -> None:
        self.bare = bare

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.bare, name)
        if not callable(found):
            return _shown(found)
        return lambda *arguments, **options: Called(
            found(*(getattr(one, "bare", one) for one in arguments), **options)
        )

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return _shown(self.bare.result() if isinstance(self.bare, Future) else self.bare)

    async def __aenter__(self) -> Any:
        return _shown(self.bare.__enter__())

    async def __aexit__(self, *error: object) -> Any:
        return self.bare.__exit__(*error)

    async def __aiter__(self) -> AsyncIterator[Any]:
        for one in self.bare:
            yield one


def _shown(bare: Any) -> Any:
    if type(bare) in (list, tuple):
        return type(bare)(_shown(one) for one in bare)
    return Called(bare) if type(bare).__module__.startswith(NOUNS) else bare


def driven(story: Story) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        story.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits for an event loop")


def driving(handle: Handler) -> Callable[..., Any]:
    """Return the handler as a plain function."""
    return lambda *arguments: driven(handle(*arguments))


async def given(result: Any) -> Any:
    """Return what a face gives at once, or once it is awaited."""
    return await result if inspect.isawaitable(result) else result


class Face:
    """The blocking face; the others replace what differs.

    What a story opens with it is closed when the story ends.
    """

    name = "blocking"

    def __init__(self) -> None:
        self._opened: list[Any] = []

    def run(self, story: Story) -> None:
        """Run a story to its end."""
        with ThreadPoolExecutor() as self._pool:
            driven(self._closing(story))

    async def _closing(self, story: Story) -> None:
        try:
            await story
        finally:
            for opened in reversed(self._opened):
                await given(opened.close())

    def connect(self, url: str | list[str], **options: Any) -> Any:
        """Return a client or a cluster."""
        client = self._connect(url, **{"service": "tests", "timeout": PATIENCE_S, **options})
        self._opened.append(client)
        return client

    def _connect(self, url: Any, **options: Any) -> Any:
        return Called(txmq.connect(url, **options))

    async def database(self, dsn: str) -> Any:
        """Open a connection that transactions take."""
        self._opened.append(await given(self._database(dsn)))
        return self._opened[-1]

    def _database(self, dsn: str) -> Any:
        return psycopg2.connect(dsn)

    async def execute(self, connection: Any, statement: str, values: Values = ()) -> None:
        """Execute a statement."""
        with connection.cursor() as cursor:
            cursor.execute(statement, values)

    def module(self, name: str) -> ModuleType:
        """Return a module of the face."""
        return import_module(f"txmq.client.{self.name}.{name}")

    def look(self, noun: Any, see: Callable[[Any], object]) -> object:
        """Return what is seen of the state of a client or consumer."""
        return see(noun)

    async def until(self, condition: Callable[[], Any], what: str = "") -> None:
        """Wait until the condition, which may be a coroutine function, holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not await given(condition()):
            assert time.monotonic() < deadline, what or condition
            await self.pause()

    async def pause(self) -> None:
        """Let others work for a moment."""
        time.sleep(PAUSE_S)  # noqa: ASYNC251  # there is no loop

    def begin(self, work: Story) -> Awaitable[Any]:
        """Begin work beside the story."""
        return Called(self._pool.submit(driven, work))

    async def begin_send(self, client: Any, topic: str, body: bytes, **fields: Any) -> Any:
        """Begin a send, and return what waits for its receipt."""
        return client.send_async(topic, body, **fields)

    async def half(self, client: Any, topic: str, body: bytes, **fields: Any) -> Any:
        """Store a half message."""
        call = client.half if hasattr(client, "half") else client.half_async
        return await call(topic, body, **fields)

    @asynccontextmanager
    async def consuming(
        self, consumer: Any, handle: Handler, *, inbox: str = "", workers: int = 1, **options: Any
    ) -> AsyncIterator[None]:
        """Call the handler for each message during the block, and close the consumer.

        `inbox` is the DSN of its database.
        """
        if inbox:
            options["inbox"] = lambda: self._database(inbox)
        work = self.begin(self.consume(consumer, handle, workers, **options))
        try:
            yield
        finally:
            await consumer.close()
            await work

    async def consume(
        self, consumer: Any, handle: Handler, workers: int = 1, **options: Any
    ) -> None:
        """Call the handler for each message until the run ends."""
        consumer.bare.run(driving(handle), workers=workers, **options)


class LoopFace(Face):
    """A face on an event loop."""

    async def run_until(
        self,
        consumer: Any,
        handler: Callable[..., object],
        done: Callable[[], Any],
        **options: Any,
    ) -> None:
        """Run the handler until `done`, which may be a coroutine function, holds. Then
        close the consumer.
        """

        async def run() -> None:
            await consumer.run(handler, **options)

        work = self.begin(run())
        try:
            await self.until(done)
        finally:
            await consumer.close()
            await work

    async def drain(
        self,
        client: Any,
        consumer: Any,
        handler: Callable[..., object],
        until: Callable[[], object] = lambda: True,
        **options: Any,
    ) -> None:
        """Run the handler until `until` holds, and the group has nothing more to
        deliver. Then close the consumer.
        """

        async def done() -> bool:
            group = await client.call("group.show", group=consumer.group)
            return bool(until()) and is_drained(group)

        await self.run_until(consumer, handler, done, **options)


class AioFace(LoopFace):
    """The face for asyncio."""

    name = "aio"

    def run(self, story: Story) -> None:
        """Run a story to its end."""
        running.run(self._closing(story))

    def _connect(self, url: Any, **options: Any) -> Any:
        return txmq.aio.connect(url, **options)

    def _database(self, dsn: str) -> Any:
        return psycopg.AsyncConnection.connect(dsn)

    async def execute(self, connection: Any, statement: str, values: Values = ()) -> None:
        """Execute a statement."""
        await connection.execute(statement, values)

    async def pause(self) -> None:
        """Let others work for a moment."""
        await asyncio.sleep(PAUSE_S)

    def begin(self, work: Story) -> Awaitable[Any]:
        """Begin work beside the story."""
        return asyncio.create_task(work)

    async def begin_send(self, client: Any, topic: str, body: bytes, **fields: Any) -> Any:
        """Begin a send, and return what waits for its receipt."""
        return await client.send_async(topic, body, **fields)

    async def consume(
        self, consumer: Any, handle: Handler, workers: int = 1, **options: Any
    ) -> None:
        """Call the handler for each message until the run ends."""
        await consumer.run(handle, workers=workers, **options)


class TwistedFace(LoopFace):
    """The face for Twisted, whose databases are used in threads."""

    name = "twisted"

    def __init__(self, reactor: Any) -> None:
        super().__init__()
        self._reactor = reactor

    def run(self, story: Story) -> None:
        """Run a story to its end."""
        make_in_reactor(self._reactor)(lambda: self._closing(story))

    def _connect(self, url: Any, **options: Any) -> Any:
        return txmq.twisted.connect(self._reactor, url, **options)

    def module(self, name: str) -> ModuleType:
        """Return a module of the face below this one."""
        return import_module(f"txmq.client.aio.{name}")

    def look(self, noun: Any, see: Callable[[Any], object]) -> object:
        """Return what is seen of the same noun of asyncio."""
        return noun._bridge.at_once(lambda: see(noun._awaited))

    async def pause(self) -> None:
        """Let others work for a moment."""
        await deferLater(self._reactor, PAUSE_S)

    def begin(self, work: Story) -> Awaitable[Any]:
        """Begin work beside the story."""
        return Deferred.fromCoroutine(work)

    async def begin_send(self, client: Any, topic: str, body: bytes, **fields: Any) -> Any:
        """Begin a send, and return what waits for its receipt."""
        return client.send(topic, body, **fields)

    async def consume(
        self, consumer: Any, handle: Handler, workers: int = 1, **options: Any
    ) -> None:
        """Call the handler for each message until the run ends."""
        call = driving(handle) if "inbox" in options else handle
        await consumer.run(call, workers=workers, **options)
