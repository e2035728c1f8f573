"""Messages in the transactions of SQLAlchemy's AsyncSession."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from psycopg2.extensions import parse_dsn
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.ext.asyncio import async_sessionmaker as SessionMaker  # noqa: N812  # it is a class
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import txmq.aio
from tests.client.aio.running import LOOPS, run
from tests.client.world import ApplicationError, World, fail
from tests.tx.postgres.peers import arguments
from txmq.aio import outcome_of
from txmq.errors import LocalProtocolError
from txmq.sqlalchemy import enlist, install
from txmq.testing.wait import PATIENCE_S, wait_until

DRIVERS = ("psycopg", "asyncpg")


class Base(DeclarativeBase):
    """The base of the mapped classes."""


class Order(Base):
    """A row that is written when the session is flushed."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


def engine_of(world: World, driver: str) -> AsyncEngine:
    known = arguments(world.dsn) if driver == "asyncpg" else parse_dsn(world.dsn)
    return create_async_engine(f"postgresql+{driver}://", connect_args=known)


@asynccontextmanager
async def sessions(world: World, driver: str) -> AsyncIterator[SessionMaker[AsyncSession]]:
    engine = engine_of(world, driver)
    install(engine)
    async with txmq.aio.connect(world.broker.url, timeout=PATIENCE_S) as client:
        yield SessionMaker(engine, info={"txmq": client})
    await engine.dispose()


async def both(world: World, session: AsyncSession, order: str) -> None:
    """Add a row, which is not flushed yet, and a message."""
    (await enlist(session)).send(world.topic, order.encode())
    session.add(Order(id=order))


def told(
    world: World,
    driver: str,
    story: Callable[[SessionMaker[AsyncSession]], Awaitable[None]],
    loop: str = "asyncio",
) -> set[str]:
    """Run the story; return the orders, of which each has a row and a message."""
    tell(world, driver, story, loop)
    assert world.orders() == world.messages()
    return world.orders()


def tell(
    world: World,
    driver: str,
    story: Callable[[SessionMaker[AsyncSession]], Awaitable[None]],
    loop: str = "asyncio",
) -> None:
    async def with_sessions() -> None:
        async with sessions(world, driver) as made:
            await story(made)

    run(with_sessions(), loop)
    wait_until(world.settled)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_rows_that_are_flushed_by_the_commit_and_messages_exist_together(
    world: World, driver: str, loop: str
) -> None:
    async def story(made: SessionMaker[AsyncSession]) -> None:
        async with made() as session:
            for order in ("o-1", "o-2"):
                await both(world, session, order)
                await session.commit()
            await both(world, session, "o-3")
            await session.rollback()
            await both(world, session, "o-4")  # the end of the session rolls back
        async with made.begin() as session:
            await both(world, session, "o-5")
        with suppress(ApplicationError):
            async with made.begin() as session:
                await both(world, session, "o-6")
                fail()

    assert told(world, driver, story, loop) == {"o-1", "o-2", "o-5"}


@pytest.mark.parametrize("driver", DRIVERS)
def test_messages_without_rows_are_committed_as_well(world: World, driver: str) -> None:
    async def story(made: SessionMaker[AsyncSession]) -> None:
        async with made.begin() as session:
            (await enlist(session)).send(world.topic, b"o-1")

    tell(world, driver, story)
    assert (world.orders(), world.messages()) == (set(), {"o-1"})


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_nested_session_takes_its_messages_back(world: World, driver: str) -> None:
    """The first that happens in a savepoint is a send, which cannot begin it."""

    async def story(made: SessionMaker[AsyncSession]) -> None:
        async with made() as session:
            for before, name in (("o-1", "o-2"), ("o-3", "o-4")):
                await both(world, session, before)
                tx = await enlist(session)
                with suppress(ApplicationError):
                    async with session.begin_nested():
                        tx.send(world.topic, name.encode())
                        session.add(Order(id=name))
                        fail()
                await session.commit()
            with suppress(ApplicationError):  # the savepoint is there before the messages
                async with session.begin_nested():
                    await both(world, session, "o-5")
                    fail()
            await both(world, session, "o-6")
            await session.commit()

    assert told(world, driver, story) == {"o-1", "o-3", "o-6"}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_nested_session_of_two_engines_takes_back_the_messages_of_each(
    world: World, driver: str
) -> None:
    other = engine_of(world, driver)
    install(other)
    of_other = {"mapper": Order}

    async def story(made: SessionMaker[AsyncSession]) -> None:
        async with made(binds={Order: other}) as session:
            await enlist(session)
            (await enlist(session, bind_arguments=of_other)).send(world.topic, b"o-1")
            session.add(Order(id="o-1"))
            tx = await enlist(session, bind_arguments=of_other)
            with suppress(ApplicationError):
                async with session.begin_nested():
                    tx.send(world.topic, b"o-2")
                    session.add(Order(id="o-2"))
                    fail()
            await session.commit()
            async with session.begin_nested():
                session.add(Order(id="o-3"))
            (await enlist(session, bind_arguments=of_other)).send(world.topic, b"o-3")
            await session.commit()
        await other.dispose()

    assert told(world, driver, story) == {"o-1", "o-3"}


@pytest.mark.parametrize("moment", ["before_flush", "before_commit"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_session_s_own_events_may_send(world: World, driver: str, moment: str) -> None:
    """As services do that collect the events of their objects."""

    def announce(session: Session, *_: object) -> None:
        for row in session.new:
            enlist(session).send(world.topic, row.id.encode())

    async def story(made: SessionMaker[AsyncSession]) -> None:
        async with made() as session:
            event.listen(session.sync_session, moment, announce)
            for order in ("o-1", "o-2"):
                session.add(Order(id=order))
                await session.commit()

    assert told(world, driver, story) == {"o-1", "o-2"}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_cancelled_commit_names_what_became_of_it(world: World, driver: str) -> None:
    """A task is cancelled after so many turns of the loop."""
    committed, named = set[str](), set[str | None]()

    async def place(made: SessionMaker[AsyncSession], order: str) -> None:
        async with made() as session:
            await both(world, session, order)
            await session.flush()
            began.set()
            await session.commit()

    began = asyncio.Event()

    async def story(made: SessionMaker[AsyncSession]) -> None:
        for turns in (0, 1, 2, 4, 8, 16, 64, 256):
            began.clear()
            task = asyncio.create_task(place(made, f"o-{turns}"))
            await began.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
                committed.add(f"o-{turns}")
            except asyncio.CancelledError as error:
                named.add(outcome_of(error))

    assert committed <= told(world, driver, story)
    assert named <= {"not done", "unknown", "done"}, named


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_could_not_work_is_refused(world: World, driver: str) -> None:
    async def story() -> None:
        engine = engine_of(world, driver)
        async with txmq.aio.connect(world.broker.url, timeout=PATIENCE_S) as client:
            async with AsyncSession(engine) as session:
                with pytest.raises(LocalProtocolError, match="take no messages along") as found:
                    await enlist(session, client)
                assert "install(engine)" in found.value.hint
                assert {"psycopg", "asyncpg"} - {driver} == {
                    other for other in DRIVERS if f"txmq.{other}." not in found.value.hint
                }
            with pytest.raises(LocalProtocolError, match="has connections already"):
                install(engine)
            await engine.dispose()
            install(engine)
            blocking: Any = world.client
            async with AsyncSession(engine) as session:
                with pytest.raises(LocalProtocolError, match="No client"):
                    await enlist(session)
                with pytest.raises(LocalProtocolError, match="this client blocks"):
                    await enlist(session, blocking)
                forgotten: Any = enlist(session, client)
                with pytest.raises(LocalProtocolError, match=r"to send .*\(await .*\)\.send\(…\)"):
                    forgotten.send(world.topic, b"o-2")
            async with engine.begin() as connection:
                (await enlist(connection, client)).send(world.topic, b"o-1")
            await engine.dispose()

    run(story())
    wait_until(world.settled)
    assert world.messages() == {"o-1"}
