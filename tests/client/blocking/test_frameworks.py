"""SQLAlchemy and Django in one decision with messages, as in docs/TRANSACTIONS.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.db.backends.postgresql.base import DatabaseWrapper
from psycopg2.extensions import parse_dsn
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.client import django_project
from tests.client.django_project import PLAIN
from tests.client.world import ApplicationError, World, fail
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.errors import LocalProtocolError, TransactionEnded
from txmq.testing.wait import PATIENCE_S

DOCUMENT = Path(__file__).parents[3] / "docs" / "TRANSACTIONS.md"
Begin = Callable[..., AbstractContextManager[Transaction]]


class Base(DeclarativeBase):
    """The base of the mapped classes."""


class OrderRow(Base):
    """A row that is written when the session is flushed."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


def documented(name: str) -> Begin:
    found = re.search(
        rf"```python\n(@contextmanager\ndef {name}\(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL
    )
    assert found is not None
    names: dict[str, Any] = {"contextmanager": contextmanager, "transaction": transaction}
    exec(found[1], names)  # the document's own code
    begin: Begin = names[name]
    return begin


@pytest.fixture
def session(world: World) -> Iterator[Session]:
    engine = create_engine("postgresql+psycopg2://", connect_args=parse_dsn(world.dsn))
    with Session(engine) as session:
        yield session
    engine.dispose()


@pytest.fixture
def database(world: World) -> Iterator[DatabaseWrapper]:
    """Django's connection of this thread."""
    with django_project.database(PLAIN, world.dsn) as wrapper:
        yield wrapper


def test_what_a_session_adds_and_messages_exist_together(world: World, session: Session) -> None:
    begin = documented("session_transaction")
    with begin(world.client, session) as tx:
        session.add(OrderRow(id="o-1"))
        with session.begin_nested():
            session.add(OrderRow(id="o-2"))
        tx.send(world.topic, b"o-1")
        tx.send(world.topic, b"o-2")
    assert not session.in_transaction()
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1", "o-2"}


def test_what_a_session_adds_goes_with_a_block_that_raises(world: World, session: Session) -> None:
    begin = documented("session_transaction")
    with suppress(ApplicationError), begin(world.client, session) as tx:
        session.add(OrderRow(id="o-1"))
        session.flush()
        tx.send(world.topic, b"o-1")
        fail()
    session.rollback()
    with begin(world.client, session) as tx:
        session.add(OrderRow(id="o-2"))
        tx.send(world.topic, b"o-2")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-2"}


@pytest.mark.parametrize("asked", [False, True])
def test_a_session_whose_flush_fails_raises_the_database_s_error(
    world: World, session: Session, *, asked: bool
) -> None:
    begin = documented("session_transaction")
    if asked:  # the block joins the transaction of a SELECT
        assert session.get(OrderRow, "o-1") is None
    with pytest.raises(IntegrityError), begin(world.client, session) as tx:  # noqa: PT012
        session.execute(text("INSERT INTO orders (id) VALUES ('o-1')"))
        session.add(OrderRow(id="o-1"))
        tx.send(world.topic, b"o-1")
        session.flush()
    session.rollback()
    assert (world.orders(), world.messages()) == (set(), set())
    with begin(world.client, session) as tx:
        session.add(OrderRow(id="o-2"))
        tx.send(world.topic, b"o-2")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-2"}


@pytest.mark.parametrize("asked", [False, True])
def test_a_session_cannot_commit_inside_the_block(
    world: World, session: Session, *, asked: bool
) -> None:
    if asked:
        assert session.get(OrderRow, "o-1") is None
    expected = TransactionEnded if asked else LocalProtocolError
    begin = documented("session_transaction")
    with pytest.raises(expected), begin(world.client, session) as tx:  # noqa: PT012
        session.add(OrderRow(id="o-1"))
        tx.send(world.topic, b"o-1")
        session.commit()
    session.rollback()
    assert world.messages() == set()
    assert world.orders() == ({"o-1"} if asked else set())


def test_a_nested_session_takes_its_messages_back(world: World, session: Session) -> None:
    begin = documented("session_transaction")
    with begin(world.client, session) as tx:
        session.add(OrderRow(id="o-1"))
        tx.send(world.topic, b"o-1")
        with suppress(ApplicationError), session.begin_nested():
            session.connection()
            session.add(OrderRow(id="o-2"))
            tx.send(world.topic, b"o-2")
            fail()
        with suppress(ApplicationError), session.begin_nested():
            session.add(OrderRow(id="o-4"))
            session.flush()
            tx.send(world.topic, b"o-4")
            fail()
        with session.begin_nested():
            session.connection()
            session.add(OrderRow(id="o-3"))
            tx.send(world.topic, b"o-3")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1", "o-3"}


def test_an_inner_atomic_block_takes_its_messages_back(
    world: World, database: DatabaseWrapper
) -> None:
    with documented("atomic_transaction")(world.client, database) as tx:
        world.insert("o-1", database)
        tx.send(world.topic, b"o-1")
        with suppress(ApplicationError), transaction.atomic():
            world.insert("o-2", database)
            tx.send(world.topic, b"o-2")
            fail()
        with transaction.atomic():
            world.insert("o-3", database)
            tx.send(world.topic, b"o-3")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1", "o-3"}


def test_django_s_rows_and_messages_exist_together(world: World, database: DatabaseWrapper) -> None:
    begin, committed = documented("atomic_transaction"), list[set[str]]()
    with begin(world.client, database) as tx:
        world.insert("o-1", database)
        with transaction.atomic():
            world.insert("o-2", database)
        transaction.on_commit(lambda: committed.append(world.orders()))
        tx.send(world.topic, b"o-1")
        tx.send(world.topic, b"o-2")
    assert committed == [{"o-1", "o-2"}]
    assert database.connection.autocommit
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1", "o-2"}


def test_django_s_rows_go_with_a_block_that_raises(world: World, database: DatabaseWrapper) -> None:
    begin, committed = documented("atomic_transaction"), list[str]()
    with suppress(ApplicationError), begin(world.client, database) as tx:
        world.insert("o-1", database)
        transaction.on_commit(lambda: committed.append("o-1"))
        tx.send(world.topic, b"o-1")
        fail()
    with suppress(ApplicationError), begin(world.client, database) as tx:
        with suppress(ApplicationError), transaction.atomic():
            world.insert("o-2", database)
            fail()
        world.insert("o-3", database)
        tx.send(world.topic, b"o-3")
    tx.wait_published(PATIENCE_S)
    assert committed == []
    assert world.orders() == world.messages() == {"o-3"}
