"""Messages in the transactions of SQLAlchemy's sessions.

    txmq.sqlalchemy.install(engine)                 # once
    with Session(engine, info={"txmq": client}) as session:
        session.add(Order(...))
        txmq.sqlalchemy.enlist(session).send("orders", body)
        session.commit()

Whatever ends the session's transaction, rows and messages go together: `commit()`,
`Session.begin()`, a two-phase session, a rollback, the end of a savepoint.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Unpack
from weakref import ref

from txmq.errors.extras import require

require("sqlalchemy", "sqlalchemy")

from sqlalchemy import event
from sqlalchemy.orm import Session
from sqlalchemy.orm import scoped_session as ScopedSession  # noqa: N812  # it is a class

from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.errors import LocalProtocolError
from txmq.tx.postgres.drivers import blocking_driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Dialect, Engine

    from txmq.client.blocking.client import Client
    from txmq.client.blocking.cluster import Cluster
    from txmq.client.blocking.transaction.enlisted import EnlistedTransaction

INFO = "txmq"  # the client's name in `Session.info`


def install(engine: Engine) -> None:
    """Let the engine's connections take messages along with their COMMIT.

    Once per engine, before its sessions are used: connections in its pool are closed.
    """
    if not event.contains(engine, "do_connect", _choose_factory):
        event.listen(engine, "do_connect", _choose_factory)
        engine.dispose()


def enlist(
    session: Session | ScopedSession[Any] | Connection,
    client: Client | Cluster | None = None,
    *,
    bind_arguments: dict[str, Any] | None = None,
    **options: Unpack[TransactionOptions],
) -> EnlistedTransaction:
    """Return the messages of the session's transaction, which the session will commit.

    They take effect with the rows on one connection: where the session has several
    engines, on that of `bind_arguments`. The client may be left out where
    `Session.info["txmq"]` has it. Another call in the same transaction returns the
    same. The options are those of `client.transaction`. Raises LocalProtocolError.
    """
    if hasattr(session, "sync_session") or hasattr(session, "sync_connection"):
        raise LocalProtocolError(
            f"{type(session).__name__} is not taken: its savepoints may begin later than a send",
            hint="use a Session in a thread, or, with txmq.aio, a connection of the driver itself: "
            "async with client.transaction(connection)",
        )
    sender = client or session.info.get(INFO)
    if sender is None:
        raise LocalProtocolError(
            "No client is given to send the messages",
            hint='enlist(session, client), or sessionmaker(engine, info={"txmq": client})',
        )
    own_session = session.registry() if isinstance(session, ScopedSession) else session
    if isinstance(own_session, Session):
        connection = own_session.connection(bind_arguments=bind_arguments)
    else:
        connection = own_session
        if not connection.in_transaction():
            connection.begin()
    own: Any = connection.connection.driver_connection
    if not blocking_driver(own).enlists:
        raise LocalProtocolError(
            f"The engine's connections are {type(own).__module__}.{type(own).__name__}, which "
            "take no messages along",
            hint="call txmq.sqlalchemy.install(engine) once, before its sessions are used; a "
            "creator of your own gives psycopg2 "
            "connection_factory=txmq.postgres.EnlistConnection, or calls "
            "txmq.psycopg.EnlistConnection.connect",
        )
    transaction = sender.enlist(own, **options)
    if isinstance(own_session, Session):
        transaction.before_each_send(partial(_begin_savepoint, ref(own_session), bind_arguments))
    return transaction


def _begin_savepoint(session: ref[Session], bind_arguments: dict[str, Any] | None) -> None:
    """Begin the savepoint of `begin_nested()`, which waits for the first statement.

    The pool has the transaction, so the reference is weak: a session that is forgotten
    gives its connection back.
    """
    live = session()
    if live is not None:
        live.connection(bind_arguments=bind_arguments)


def _choose_factory(
    dialect: Dialect, _record: object, arguments: Sequence[Any], options: dict[str, Any]
) -> object:
    """Connect by a class that takes messages along, or let SQLAlchemy do that."""
    if dialect.driver == "psycopg2":
        from txmq import postgres  # noqa: PLC0415  # the engine's driver only

        options.setdefault("connection_factory", postgres.EnlistConnection)
        return None
    if dialect.driver == "psycopg" and not dialect.is_async:
        from txmq import psycopg  # noqa: PLC0415  # likewise

        return psycopg.EnlistConnection.connect(*arguments, **options)
    return None
