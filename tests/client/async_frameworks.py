"""The ways of asyncio to have rows and messages in one transaction, behind the same
face.

The scenes are plain functions, so each way runs its coroutines on a loop in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import asyncpg
import psycopg
from psycopg2.extensions import parse_dsn
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import txmq.aio
import txmq.asyncpg
import txmq.psycopg
import txmq.sqlalchemy
from tests.client.frameworks import Framework, Work
from tests.client.world import World
from tests.tx.postgres.peers import arguments
from txmq.testing.wait import PATIENCE_S, wait_until


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Awaitable[Any]) -> Any:
        """Return the result of what is awaited."""

        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(PATIENCE_S)

    @contextmanager
    def within(self, context: Any) -> Iterator[Any]:
        """Enter an asynchronous context for the block."""
        entered = self.do(context.__aenter__())
        try:
            yield entered
        except BaseException as error:
            if not self.do(context.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.do(context.__aexit__(None, None, None))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Called:
    """A connection of asyncio, as the scenes call it."""

    def __init__(self, connection: Any, loop: Loop) -> None:
        self._connection, self._loop = connection, loop
        self.info = self

    @property
    def backend_pid(self) -> int:
        own = self._connection
        if isinstance(own, psycopg.AsyncConnection):
            return own.info.backend_pid
        return int(own.get_server_pid())

    def hear_of_its_loss(self) -> None:
        """Wait until asyncpg knows that the server has ended it; psycopg learns so when
        it is used.
        """
        if not isinstance(self._connection, psycopg.AsyncConnection):
            wait_until(self._connection.is_closed, what="asyncpg to hear of the loss")

    def close(self) -> None:
        self._loop.do(self._connection.close())

    def commit(self) -> None:
        self._loop.do(self._connection.commit())

    def rollback(self) -> None:
        self._loop.do(self._connection.rollback())


class _Async(Framework):
    """A driver of asyncio."""

    asyncpg: ClassVar[bool] = False
    enlists: ClassVar[bool] = True

    def __init__(self, world: World, stack: ExitStack) -> None:
        super().__init__(world, stack)
        self.loop = Loop()
        stack.callback(self.loop.close)
        client = txmq.aio.connect(world.broker.url, timeout=PATIENCE_S)
        self.client = stack.enter_context(self.loop.within(client))

    def connect(self, isolation: str = "") -> Any:
        connection = self.loop.do(self._connected(isolation))
        if self.asyncpg:
            self._stack.callback(lambda: self.loop.do(terminated(connection)))
        else:
            self._stack.callback(lambda: self.loop.do(connection.close()))
        return connection

    async def _connected(self, isolation: str) -> Any:
        if self.asyncpg:
            kind = txmq.asyncpg.EnlistConnection if self.enlists else asyncpg.Connection
            connection = await asyncpg.connect(**arguments(self.world.dsn), connection_class=kind)
            if isolation:
                await connection.execute(
                    f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation}"
                )
            return connection
        own = txmq.psycopg.AsyncEnlistConnection if self.enlists else psycopg.AsyncConnection
        opened: Any = await own.connect(self.world.dsn)
        if isolation:
            await opened.set_isolation_level(psycopg.IsolationLevel[isolation])
        return opened

    def work(self, connection: Any, transaction: Any) -> Work:
        def execute(statement: str) -> None:
            self.loop.do(connection.execute(statement))

        def savepoint() -> AbstractContextManager[Any]:
            return self.loop.within(connection.transaction())

        return Work(execute, transaction, savepoint, Called(connection, self.loop))

    def autocommit(self) -> None:
        connection = self.connect()
        if not self.asyncpg:
            self.loop.do(connection.set_autocommit(True))
        self.enlist(connection)

    def enlist(self, connection: Any) -> Any:
        async def enlisted() -> Any:
            return self.client.enlist(connection)

        return self.loop.do(enlisted())


async def terminated(connection: Any) -> None:
    connection.terminate()


class AsyncBlock(_Async):
    """The block of `client.transaction`."""

    name = "psycopg, `client.transaction`"
    enlists = False

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        connection = self.connect(isolation)
        with self.loop.within(self.client.transaction(connection)) as tx:
            yield self.work(connection, lambda: tx)

    def autocommit(self) -> None:
        connection = self.connect()
        if not self.asyncpg:
            self.loop.do(connection.set_autocommit(True))
        with self.loop.within(self.client.transaction(connection)) as tx:
            self.loop.do(connection.execute("INSERT INTO orders (id) VALUES ('o-1')"))
            tx.send(self.world.topic, b"o-1")


class AsyncpgBlock(AsyncBlock):
    """Likewise with asyncpg."""

    name = "asyncpg, `client.transaction`"
    asyncpg = True


class AsyncBare(_Async):
    """`await connection.commit()` of an `AsyncEnlistConnection`."""

    name = "psycopg, `commit()`"

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        connection = self.connect(isolation)
        try:
            yield self.work(connection, lambda: self.enlist(connection))
        except BaseException:
            self.loop.do(connection.rollback())
            raise
        self.loop.do(connection.commit())


class AsyncOwnBlock(_Async):
    """`connection.transaction()` of an `AsyncEnlistConnection`."""

    name = "psycopg, `transaction()`"

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        connection = self.connect(isolation)
        with self.loop.within(connection.transaction()):
            yield self.work(connection, lambda: self.enlist(connection))


class AsyncpgOwnBlock(AsyncOwnBlock):
    """`connection.transaction()` of asyncpg."""

    name = "asyncpg, `transaction()`"
    asyncpg = True


class OfAsyncSession(_Async):
    """An AsyncSession of SQLAlchemy."""

    name = "psycopg, SQLAlchemy"

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        with self.session(isolation) as session, self.loop.within(session.begin()):
            connection = self.loop.do(session.connection())
            own = self.loop.do(connection.get_raw_connection())
            called = Called(own.driver_connection, self.loop)
            yield Work(
                lambda statement: self.loop.do(session.execute(text(statement))),
                lambda: self.loop.do(txmq.sqlalchemy.enlist(session)),
                lambda: self.loop.within(session.begin_nested()),
                called,
            )

    @contextmanager
    def session(self, isolation: str) -> Iterator[AsyncSession]:
        options: Any = {"isolation_level": isolation} if isolation else {}
        driver = "asyncpg" if self.asyncpg else "psycopg"
        known = arguments if self.asyncpg else parse_dsn
        engine = create_async_engine(
            f"postgresql+{driver}://", connect_args=known(self.world.dsn), **options
        )
        txmq.sqlalchemy.install(engine)
        self._stack.callback(lambda: self.loop.do(engine.dispose()))
        with self.loop.within(AsyncSession(engine, info={"txmq": self.client})) as session:
            yield session

    def autocommit(self) -> None:
        with self.session("AUTOCOMMIT") as session:
            self.loop.do(txmq.sqlalchemy.enlist(session))


class OfAsyncpgSession(OfAsyncSession):
    """Likewise with asyncpg."""

    name = "asyncpg, SQLAlchemy"
    asyncpg = True


ASYNC_FRAMEWORKS: tuple[type[Framework], ...] = (
    AsyncBlock,
    AsyncBare,
    AsyncOwnBlock,
    AsyncpgBlock,
    AsyncpgOwnBlock,
    OfAsyncSession,
    OfAsyncpgSession,
)
