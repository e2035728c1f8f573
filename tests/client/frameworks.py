"""The ways to have rows and messages in one transaction, behind one face.

Each begins a transaction as its users do, and ends it as its users do: by the end of a
block, by a bare `commit()`, or by hooks around one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import psycopg
import psycopg2
from django.db import transaction
from psycopg2.extensions import parse_dsn
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import txmq.django
import txmq.psycopg
import txmq.sqlalchemy
from tests.client import django_project
from tests.client.django_project import OWN
from tests.client.world import World
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.postgres import EnlistConnection


class Work:
    """An open transaction: its statements, its messages, its driver's connection."""

    def __init__(
        self,
        execute: Callable[[str], object],
        transaction: Callable[[], Transaction],
        savepoint: Callable[[], AbstractContextManager[Any]],
        connection: Any,
    ) -> None:
        self.execute, self.savepoint, self.connection = execute, savepoint, connection
        self.transaction = transaction


class Framework(ABC):
    """A way to begin and end transactions with messages."""

    name: ClassVar[str]

    def __init__(self, world: World, stack: ExitStack) -> None:
        self.world, self._stack = world, stack
        self.hits: list[str] = []  # what a scene has done, as it has seen it done

    @abstractmethod
    def transaction(self, isolation: str = "") -> AbstractContextManager[Work]:
        """Begin a transaction; commit it at the end, or roll it back after an error."""

    @abstractmethod
    def autocommit(self) -> None:
        """Begin a transaction in autocommit mode."""


class _Driver(Framework):
    """A driver alone: psycopg2."""

    factory: Any = None

    def connect(self, isolation: str = "") -> Any:
        connection = psycopg2.connect(self.world.dsn, connection_factory=self.factory)
        self._stack.callback(connection.close)
        if isolation:
            connection.isolation_level = isolation
        return connection

    def work(self, connection: Any, transaction: Callable[[], Transaction]) -> Work:
        def execute(statement: str) -> None:
            with connection.cursor() as cursor:
                cursor.execute(statement)

        @contextmanager
        def savepoint() -> Iterator[None]:
            execute("SAVEPOINT own")
            try:
                yield
            except BaseException:
                execute("ROLLBACK TO SAVEPOINT own")
                raise
            execute("RELEASE SAVEPOINT own")

        return Work(execute, transaction, savepoint, connection)

    def autocommit(self) -> None:
        connection = self.connect()
        connection.autocommit = True
        self.world.client.enlist(connection)


class Block(_Driver):
    """The block of `client.transaction`, which commits by itself."""

    name = "`client.transaction`"

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        connection = self.connect(isolation)
        with self.world.client.transaction(connection) as tx:
            yield self.work(connection, lambda: tx)

    def autocommit(self) -> None:
        connection = self.connect()
        connection.autocommit = True
        with self.world.client.transaction(connection) as tx:
            self.world.insert("o-1", connection)
            tx.send(self.world.topic, b"o-1")


class Bare(_Driver):
    """`connection.commit()` of an `EnlistConnection`."""

    name = "`EnlistConnection`"
    factory: Any = EnlistConnection

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        connection = self.connect(isolation)
        try:
            yield self.work(connection, lambda: self.world.client.enlist(connection))
        except BaseException:
            connection.rollback()
            raise
        connection.commit()


class Hooks(_Driver):
    """A connection of psycopg2's own, with hooks around its `commit()`."""

    name = "hooks of your own"

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        connection = self.connect(isolation)
        tx = self.world.client.enlist(connection, hooks=True)
        try:
            yield self.work(connection, lambda: tx)
            tx.before_commit()
            connection.commit()
        except BaseException:
            try:
                connection.rollback()
            finally:
                tx.after_rollback()
            raise
        tx.after_commit()


class _Psycopg(_Driver):
    """psycopg 3."""

    factory = psycopg.Connection

    def connect(self, isolation: str = "") -> Any:
        connection = self.factory.connect(self.world.dsn)
        self._stack.callback(connection.close)
        if isolation:
            connection.isolation_level = psycopg.IsolationLevel[isolation]
        return connection


class PsycopgBlock(_Psycopg, Block):
    """The block of `client.transaction`."""


class PsycopgBare(_Psycopg, Bare):
    """`connection.commit()` of an `EnlistConnection`."""

    factory = txmq.psycopg.EnlistConnection


class PsycopgOwnBlock(_Psycopg):
    """`connection.transaction()` of an `EnlistConnection`."""

    name = "`connection.transaction()`"
    factory = txmq.psycopg.EnlistConnection

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        connection = self.connect(isolation)
        with connection.transaction():
            work = self.work(connection, lambda: self.world.client.enlist(connection))
            work.savepoint = connection.transaction
            yield work


class PsycopgHooks(_Psycopg, Hooks):
    """Hooks around a `commit()` of psycopg's own."""


class OfSession(Framework):
    """A session of SQLAlchemy."""

    name = "SQLAlchemy"
    dialect = "postgresql+psycopg2"
    two_phase = False

    def engine(self, **options: Any) -> Engine:
        engine = create_engine(
            f"{self.dialect}://", connect_args=parse_dsn(self.world.dsn), **options
        )
        self._stack.callback(engine.dispose)
        txmq.sqlalchemy.install(engine)
        return engine

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        options = {"isolation_level": isolation} if isolation else {}
        session = Session(self.engine(**options), twophase=self.two_phase)
        with session, session.begin():

            def execute(statement: str) -> None:
                session.execute(text(statement))

            yield Work(
                execute,
                lambda: txmq.sqlalchemy.enlist(session, self.world.client),
                session.begin_nested,
                session.connection().connection.dbapi_connection,
            )

    def autocommit(self) -> None:
        with Session(self.engine(isolation_level="AUTOCOMMIT")) as session:
            txmq.sqlalchemy.enlist(session, self.world.client)


class TwoPhases(OfSession):
    """A session of SQLAlchemy with `twophase=True`."""

    name = "SQLAlchemy, `twophase`"
    two_phase = True


class PsycopgSession(OfSession):
    """A session on psycopg 3."""

    dialect = "postgresql+psycopg"


class PsycopgTwoPhases(TwoPhases):
    """A session of two phases on psycopg 3."""

    dialect = "postgresql+psycopg"


class Atomic(Framework):
    """Django's `atomic()`, on psycopg 3 where that is installed."""

    name = "Django"

    def __init__(self, world: World, stack: ExitStack) -> None:
        super().__init__(world, stack)
        stack.enter_context(django_project.sender(world.client))
        self._wrapper = stack.enter_context(django_project.database(OWN, world.dsn))

    @contextmanager
    def transaction(self, isolation: str = "") -> Iterator[Work]:
        wrapper = self._wrapper
        wrapper.ensure_connection()
        if isolation:
            wrapper.connection.isolation_level = psycopg.IsolationLevel[isolation]

        def execute(statement: str) -> None:
            with wrapper.cursor() as cursor:
                cursor.execute(statement)

        with transaction.atomic(using=OWN):
            yield Work(
                execute,
                lambda: txmq.django.enlist(OWN),
                lambda: transaction.atomic(using=OWN),
                wrapper.connection,
            )

    def autocommit(self) -> None:
        txmq.django.send(self.world.topic, b"o-1", using=OWN)


# By the tables that show what users see.
BLOCKING_FRAMEWORKS: tuple[tuple[type[Framework], ...], ...] = (
    (Block, Bare, Hooks, OfSession, TwoPhases),  # psycopg2
    (
        PsycopgBlock,
        PsycopgBare,
        PsycopgOwnBlock,
        PsycopgHooks,
        PsycopgSession,
        PsycopgTwoPhases,
        Atomic,
    ),
)
