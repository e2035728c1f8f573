"""Messages in the transactions of SQLAlchemy's sessions.

    txmq.sqlalchemy.install(engine)                 # once
    with Session(engine, info={"txmq": client}) as session:
        session.add(Order(...))
        txmq.sqlalchemy.enlist(session).send("orders", body)
        session.commit()

Whatever ends the session's transaction, rows and messages go together: `commit()`,
`Session.begin()`, a two-phase session, a rollback, the end of a savepoint.

An `AsyncSession` with psycopg or asyncpg takes a client of `txmq.aio`:

    async with AsyncSession(engine, info={"txmq": client}) as session:
        (await txmq.sqlalchemy.enlist(session)).send("orders", body)
        await session.commit()
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack, cast, overload
from weakref import WeakSet, ref

from txmq.errors.extras import require

require("sqlalchemy", "sqlalchemy")

from sqlalchemy import event
from sqlalchemy.orm import Session
from sqlalchemy.orm import scoped_session as ScopedSession  # noqa: N812  # it is a class

from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.errors import LocalProtocolError
from txmq.tx.postgres.driver import Status
from txmq.tx.postgres.drivers import driver_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Dialect, Engine
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
    )
    from sqlalchemy.orm import SessionTransaction

    from txmq import aio
    from txmq.client.blocking.client import Client
    from txmq.client.blocking.cluster import Cluster
    from txmq.client.blocking.transaction.enlisted import EnlistedTransaction

# Not `event.contains`, which goes by addresses: those of engines that are gone return.
_installed = WeakSet["Engine"]()
INFO = "txmq"  # the client's name in `Session.info`
# how a creator of one's own connects, by the names of SQLAlchemy's drivers and whether
# they await
_CREATORS = {
    ("psycopg2", False): "psycopg2.connect(…, connection_factory=txmq.postgres.EnlistConnection)",
    ("psycopg", False): "txmq.psycopg.EnlistConnection.connect(…)",
    ("psycopg", True): "await txmq.psycopg.AsyncEnlistConnection.connect(…)",
    ("asyncpg", True): "await asyncpg.connect(…, connection_class=txmq.asyncpg.EnlistConnection)",
}
_SAVEPOINTS = "txmq.savepoints"  # likewise, of the connections whose savepoints begin at once


def install(engine: Engine | AsyncEngine) -> None:
    """Let the engine's connections take messages along with their COMMIT.

    Once per engine, before its sessions are used: connections in its pool are closed.
    Those of an AsyncEngine cannot be: then it raises LocalProtocolError.
    """
    own = cast("Engine", getattr(engine, "sync_engine", engine))
    if own in _installed:
        return
    if own is not engine and getattr(own.pool, "checkedin", int)():
        raise LocalProtocolError(
            "the engine's pool has connections already, which take no messages along",
            hint="call txmq.sqlalchemy.install(engine) where the engine is made",
        )
    event.listen(own, "do_connect", _choose_factory)
    _installed.add(own)
    own.dispose()


@overload
def enlist(
    session: Session | ScopedSession[Any] | Connection,
    client: Client | Cluster | None = None,
    *,
    bind_arguments: dict[str, Any] | None = None,
    **options: Unpack[TransactionOptions],
) -> EnlistedTransaction: ...


@overload
def enlist(
    session: AsyncSession | async_scoped_session[Any] | AsyncConnection,
    client: aio.Client | aio.Cluster | None = None,
    *,
    bind_arguments: dict[str, Any] | None = None,
    **options: Unpack[TransactionOptions],
) -> Awaitable[aio.EnlistedTransaction]: ...


def enlist(
    session: Any,
    client: Any = None,
    *,
    bind_arguments: dict[str, Any] | None = None,
    **options: Unpack[TransactionOptions],
) -> Any:
    """Return the messages of the session's transaction, which the session will commit.

    They take effect with the rows on one connection: where the session has several
    engines, on that of `bind_arguments`. The client may be left out where
    `Session.info["txmq"]` has it. Another call in the same transaction returns the
    same. The options are those of `client.transaction`. Raises LocalProtocolError.

    To be awaited for an AsyncSession. Its events and `run_sync` have its Session: there
    it is not, and gives the messages of a client of `txmq.aio` as well.
    """
    session = session.registry() if hasattr(session, "registry") else session
    if hasattr(session, "run_sync"):
        return _Enlisting(session.run_sync(_enlisted, client, bind_arguments, options))
    return _enlisted(session, client, bind_arguments, options)


class _Enlisting:
    """The messages of an AsyncSession's transaction, to be awaited."""

    def __init__(self, work: Coroutine[Any, Any, object]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, object]:
        return self._work.__await__()

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):  # Python's own look at what it is
            raise AttributeError(name)
        self._work.close()
        raise LocalProtocolError(
            f"enlist() of an AsyncSession was to {name} before it was awaited",
            hint=f"(await txmq.sqlalchemy.enlist(session)).{name}(…)",
        )


def _enlisted(
    session: Session | Connection,
    client: Client | Cluster | None,
    bind_arguments: dict[str, Any] | None,
    options: TransactionOptions,
) -> object:
    sender = client or session.info.get(INFO)
    if sender is None:
        raise LocalProtocolError(
            "No client is given to send the messages",
            hint='enlist(session, client), or sessionmaker(engine, info={"txmq": client})',
        )
    if isinstance(session, Session):
        connection = session.connection(bind_arguments=bind_arguments)
    else:
        connection = session
        if not connection.in_transaction():
            connection.begin()
    own: Any = connection.connection.driver_connection
    driver = driver_of(own)
    if not driver.enlists:
        raise LocalProtocolError(
            f"The engine's connections are {type(own).__module__}.{type(own).__name__}, which "
            "take no messages along",
            hint="call txmq.sqlalchemy.install(engine) once, before its sessions are used; a "
            f"creator of your own returns {_creator(connection.dialect)}",
        )
    if connection.dialect.driver == "asyncpg" and driver.status is Status.IDLE:
        # Its transaction begins with the first statement; without one nothing commits.
        connection.exec_driver_sql("SELECT")
    transaction = sender.enlist(own, **options)
    if not isinstance(session, Session):
        return cast("object", transaction)
    if not driver.awaits:
        transaction.before_each_send(_PutOff(ref(session), bind_arguments))
        return cast("object", transaction)
    # A send cannot wait for a savepoint, so those begin at once.
    if _SAVEPOINTS not in session.info:
        session.info[_SAVEPOINTS] = []
        event.listen(session, "after_transaction_create", _begin_at_once)
    if bind_arguments not in session.info[_SAVEPOINTS]:
        session.info[_SAVEPOINTS].append(bind_arguments)
    return cast("object", transaction)


def _creator(dialect: Dialect) -> str:
    return _CREATORS.get((dialect.driver, dialect.is_async), "an EnlistConnection of txmq's")


def _begin_at_once(session: Session, transaction: SessionTransaction) -> None:
    """Begin the savepoint of `begin_nested()` on each connection of an AsyncSession
    that has messages.
    """
    if transaction.parent is None:  # another transaction: nothing is enlisted yet
        session.info[_SAVEPOINTS].clear()
    if transaction.nested:
        for bind_arguments in session.info[_SAVEPOINTS]:
            session.connection(bind_arguments=bind_arguments)


@dataclass(frozen=True)
class _PutOff:
    """The savepoint of `begin_nested()`, which waits for the first statement.

    The pool has the transaction, so the reference is weak: a session that is forgotten
    gives its connection back.
    """

    session: ref[Session]
    bind_arguments: dict[str, Any] | None

    def __call__(self) -> None:
        """Begin it, unless the session is between two transactions or forgotten."""
        live = self.session()
        if live is not None and live.in_transaction():
            live.connection(bind_arguments=self.bind_arguments)


def _choose_factory(
    dialect: Dialect, _record: object, arguments: Sequence[Any], options: dict[str, Any]
) -> object:
    """Connect by a class that takes messages along, or let SQLAlchemy do that."""
    if dialect.driver == "psycopg2":
        from txmq import postgres  # noqa: PLC0415  # the engine's driver only

        options.setdefault("connection_factory", postgres.EnlistConnection)
        return None
    if dialect.driver == "asyncpg":
        from txmq import asyncpg  # noqa: PLC0415  # likewise

        options.setdefault("connection_class", asyncpg.EnlistConnection)
    if dialect.driver == "psycopg":
        from txmq import psycopg  # noqa: PLC0415  # likewise

        if not dialect.is_async:
            return psycopg.EnlistConnection.connect(*arguments, **options)
        options.setdefault("async_creator_fn", psycopg.AsyncEnlistConnection.connect)
    return None
