"""Messages in the transactions of SQLAlchemy, which commits by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from psycopg2.extensions import parse_dsn
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session
from sqlalchemy.orm import sessionmaker as SessionMaker  # noqa: N812  # it is a class

from tests.client.world import ApplicationError, World, fail
from txmq.errors import ClientClosed, LocalProtocolError
from txmq.sqlalchemy import enlist, install
from txmq.testing.wait import wait_until

ENGINES = 100  # one of so many takes the address of another one that is gone


class Base(DeclarativeBase):
    """The base of the mapped classes."""


class Order(Base):
    """A row that is written when the session is flushed."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    engine = create_engine("postgresql+psycopg2://", connect_args=parse_dsn(world.dsn))
    install(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(world: World, engine: Engine) -> SessionMaker[Session]:
    return SessionMaker(engine, info={"txmq": world.client})


def both(world: World, session: Any, order: str) -> None:
    """Add a row, which is not flushed yet, and a message."""
    enlist(session).send(world.topic, order.encode())
    session.add(Order(id=order))


def agreed(world: World) -> set[str]:
    wait_until(world.settled)
    assert world.orders() == world.messages()
    return world.orders()


def test_rows_that_are_flushed_by_the_commit_and_messages_exist_together(
    world: World, sessions: SessionMaker[Session]
) -> None:
    with sessions() as session:
        for order in ("o-1", "o-2"):
            both(world, session, order)
            session.commit()
        both(world, session, "o-3")
        session.rollback()
        both(world, session, "o-4")  # the end of the session rolls back
    with sessions.begin() as session:
        both(world, session, "o-5")
    with suppress(ApplicationError), sessions.begin() as session:
        both(world, session, "o-6")
        fail()
    scoped = scoped_session(sessions)
    both(world, scoped, "o-7")
    scoped.commit()
    scoped.remove()
    assert agreed(world) == {"o-1", "o-2", "o-5", "o-7"}


def test_a_flush_that_fails_in_the_commit_takes_the_messages_with_it(
    world: World, sessions: SessionMaker[Session]
) -> None:
    with sessions() as session:
        both(world, session, "o-1")
        session.commit()
        both(world, session, "o-2")
        session.add(Order(id="o-1"))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        both(world, session, "o-3")
        session.commit()
    assert agreed(world) == {"o-1", "o-3"}


@pytest.mark.parametrize("twophase", [False, True])
def test_a_nested_session_takes_its_messages_back(
    world: World, sessions: SessionMaker[Session], *, twophase: bool
) -> None:
    with sessions(twophase=twophase) as session:
        tx = enlist(session)
        with suppress(ApplicationError), session.begin_nested():
            tx.send(world.topic, b"o-1")  # the first that happens there
            session.add(Order(id="o-1"))
            fail()
        with session.begin_nested():
            both(world, session, "o-2")
            with suppress(ApplicationError), session.begin_nested():
                tx.send(world.topic, b"o-3")
                session.add(Order(id="o-3"))
                session.flush()
                fail()
        session.commit()
    assert agreed(world) == {"o-2"}


@pytest.mark.parametrize("moment", ["before_flush", "after_flush", "before_commit"])
def test_a_session_s_own_events_may_send(
    world: World, sessions: SessionMaker[Session], moment: str
) -> None:
    """As services do that collect the events of their objects."""

    def announce(session: Session, *_: object) -> None:
        for row in session.new:
            enlist(session).send(world.topic, row.id.encode())

    with sessions() as session:
        event.listen(session, moment, announce)
        for order in ("o-1", "o-2"):
            session.add(Order(id=order))
            session.commit()
    assert agreed(world) == {"o-1", "o-2"}


def test_a_session_of_two_engines_has_messages_with_either(
    world: World, engine: Engine, sessions: SessionMaker[Session]
) -> None:
    other = create_engine("postgresql+psycopg2://", connect_args=parse_dsn(world.dsn))
    install(other)
    with sessions(binds={Order: other}, twophase=True) as session:
        both(world, session, "o-1")
        tx = enlist(session, bind_arguments={"mapper": Order})
        assert tx is not enlist(session)
        tx.send(world.topic, b"o-2")
        session.add(Order(id="o-2"))
        session.commit()
    other.dispose()
    assert agreed(world) == {"o-1", "o-2"}


def test_sessions_that_share_a_connection_take_back_messages_of_their_own(
    world: World, engine: Engine
) -> None:
    """Each has put off its own savepoint when it sends."""
    with engine.begin() as connection:
        one, other = (Session(connection, info={"txmq": world.client}) for _ in range(2))
        tx = enlist(one)
        assert enlist(other) is tx
        with suppress(ApplicationError), one.begin_nested():
            tx.send(world.topic, b"o-1")
            fail()
        one.close()
        both(world, other, "o-2")
        with suppress(ApplicationError), other.begin_nested():
            both(world, other, "o-3")
            fail()
        other.commit()
        assert not one.in_transaction()
    assert agreed(world) == {"o-2"}


def test_a_connection_of_the_core_takes_messages_along(world: World, engine: Engine) -> None:
    insert = text("INSERT INTO orders (id) VALUES (:id)")
    with engine.begin() as connection:
        enlist(connection, world.client).send(world.topic, b"o-1")
        connection.execute(insert, {"id": "o-1"})
    with engine.connect() as connection:
        enlist(connection, world.client).send(world.topic, b"o-2")
        connection.execute(insert, {"id": "o-2"})
        connection.commit()
        enlist(connection, world.client).send(world.topic, b"o-3")
        connection.execute(insert, {"id": "o-3"})
    assert agreed(world) == {"o-1", "o-2"}


def test_a_forgotten_session_gives_its_connection_back_without_its_messages(
    world: World, sessions: SessionMaker[Session]
) -> None:
    session = sessions()
    both(world, session, "o-1")
    tx = enlist(session)
    del session
    gc.collect()
    with pytest.raises(ClientClosed):
        tx.send(world.topic, b"o-1")
    with sessions() as session:
        both(world, session, "o-2")
        session.commit()
    assert agreed(world) == {"o-2"}


def test_an_engine_at_the_address_of_a_forgotten_one_is_installed_as_well(world: World) -> None:
    def made() -> Engine:
        return create_engine("postgresql+psycopg2://", connect_args=parse_dsn(world.dsn))

    addresses, dialects = set[int](), list[object]()
    engine = made()
    while id(engine) not in addresses and len(addresses) < ENGINES:
        install(engine)
        addresses.add(id(engine))
        dialects.append(engine.dialect)  # which has the events, and may outlive its engine
        del engine
        gc.collect()
        engine = made()
    install(engine)
    with Session(engine, info={"txmq": world.client}) as session:
        both(world, session, "o-1")
        session.commit()
    engine.dispose()
    assert agreed(world) == {"o-1"}


def test_sessions_that_cannot_take_messages_along_say_what_to_do(
    world: World, engine: Engine
) -> None:
    plain = create_engine("postgresql+psycopg2://", connect_args=parse_dsn(world.dsn))
    with Session(plain) as session:
        with pytest.raises(LocalProtocolError, match="No client"):
            enlist(session)
        told = r"psycopg2.extensions.connection.*install\(engine\).*=txmq\.postgres\.Enlist"
        with pytest.raises(LocalProtocolError, match=told):
            enlist(session, world.client)
    install(plain)  # connections of its pool are replaced
    install(plain)
    with Session(plain) as session:
        enlist(session, world.client)
    plain.dispose()
