"""Handlers on asyncio that end the transaction of their message: as in the blocking
client, the message fails, and no part of its effects stays.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import asyncpg
import psycopg
import pytest

import txmq.aio
from tests.client.aio.databases import DATABASES, Database
from tests.client.aio.running import run
from tests.client.faces.face import AioFace
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, World
from txmq.testing.wait import PATIENCE_S


class Handled(NamedTuple):
    """What a scene gets: the handler's connection, and what belongs to it."""

    connection: Any
    database: Database
    client: txmq.aio.Client

    async def execute(self, statement: str) -> None:
        """Execute a statement as a service does."""
        await self.database.execute(self.connection, statement)

    async def insert(self, order: str) -> None:
        """Insert a row."""
        await self.execute(f"INSERT INTO orders (id) VALUES ('{order}')")


Act = Callable[[Handled], Awaitable[None]]


async def commit(at: Handled) -> None:
    await at.connection.commit()


async def roll_back(at: Handled) -> None:
    await at.connection.rollback()


async def commit_by_sql(at: Handled) -> None:
    await at.execute("COMMIT")


async def roll_back_by_sql(at: Handled) -> None:
    await at.execute("ROLLBACK")


async def commit_in_a_string(at: Handled) -> None:
    await at.execute("SELECT 1; COMMIT")


async def roll_back_in_a_string(at: Handled) -> None:
    await at.execute("SELECT 1; ROLLBACK")


async def commit_unseen(at: Handled) -> None:
    if isinstance(at.connection, psycopg.AsyncConnection):
        await psycopg.AsyncClientCursor(at.connection).execute("COMMIT")
    else:
        await asyncpg.Connection.execute(at.connection, "COMMIT")


async def roll_back_unseen(at: Handled) -> None:
    if isinstance(at.connection, psycopg.AsyncConnection):
        await psycopg.AsyncClientCursor(at.connection).execute("ROLLBACK")
    else:
        await asyncpg.Connection.execute(at.connection, "ROLLBACK")


async def another_transaction(at: Handled) -> None:
    for statement in ("ROLLBACK", "BEGIN", "INSERT INTO orders (id) VALUES ('own')"):
        if isinstance(at.connection, psycopg.AsyncConnection):
            await psycopg.AsyncClientCursor(at.connection).execute(statement)
        else:
            await asyncpg.Connection.execute(at.connection, statement)


async def with_connection(at: Handled) -> None:
    """The idiom of psycopg 3, whose end commits and closes."""
    async with at.connection:
        await at.insert("own")


async def with_connection_that_fails(at: Handled) -> None:
    with suppress(ApplicationError):
        async with at.connection:
            await at.insert("own")
            raise ApplicationError


async def own_block(at: Handled) -> None:
    async with at.client.transaction(at.connection):
        await at.insert("own")


async def enlist(at: Handled) -> None:
    at.client.enlist(at.connection, hooks=True)


COMMON = (
    commit_by_sql,
    roll_back_by_sql,
    commit_in_a_string,
    roll_back_in_a_string,
    commit_unseen,
    roll_back_unseen,
    another_transaction,
)
OF_PSYCOPG = (commit, roll_back, with_connection, with_connection_that_fails)
SCENES = [
    *((driver, act, swallowed) for driver in DATABASES for act in COMMON for swallowed in (0, 1)),
    *(("psycopg", act, swallowed) for act in OF_PSYCOPG for swallowed in (0, 1)),
    # Both are refused before they do anything.
    *((driver, act, 0) for driver in DATABASES for act in (own_block, enlist)),
]


@pytest.mark.parametrize("enlisting", [False, True], ids=["plain", "enlisting"])
@pytest.mark.parametrize(("driver", "act", "swallowed"), SCENES)
def test_a_handler_that_ends_the_transaction_of_its_message_has_failed(
    world: World, driver: str, act: Act, *, swallowed: int, enlisting: bool
) -> None:
    database = DATABASES[driver]

    async def story() -> None:
        async with txmq.aio.connect(world.broker.url, timeout=PATIENCE_S) as client:
            topic, group = fresh("in"), fresh("g")
            for body in (b"good", b"bad", b"fine"):
                await client.send(topic, body, key="k")

            async def connect() -> Any:
                opening = database.connect_enlisting if enlisting else database.connect
                return await opening(world.dsn)

            async def handle(message: Any, connection: Any) -> None:
                at, body = Handled(connection, database, client), message.body.decode()
                await at.insert(f"{body}-a-{message.attempt}")
                if body == "bad":
                    with suppress(Exception) if swallowed else nullcontext():
                        await act(at)
                    with suppress(Exception) if swallowed else nullcontext():
                        await at.insert(f"{body}-b-{message.attempt}")

            retry = txmq.RetryPolicy((0,), retries=2)
            consumer = await client.consumer(group, [topic], retry=retry)
            await AioFace().drain(client, consumer, handle, inbox=connect)
            assert (consumer.stats.nacked, consumer.stats.duplicates) == (3, 0)
            [letter] = [letter async for letter in client.letters(group)]
            assert "connection of its own" in letter.error_text, "what to do instead"
            assert world.orders() == {"fine-a-1", "good-a-1"}

    run(story())


@pytest.mark.parametrize("driver", DATABASES)
def test_a_handler_may_take_a_part_back(world: World, driver: str) -> None:
    """By savepoints, which the driver's own blocks are in a transaction."""
    database = DATABASES[driver]

    async def story() -> None:
        async with txmq.aio.connect(world.broker.url, timeout=PATIENCE_S) as client:
            topic = fresh("in")
            await client.send_batch(topic, [txmq.Message(b"o-%d" % n, key="k") for n in range(4)])

            async def handle(message: Any, connection: Any) -> None:
                at, order = Handled(connection, database, client), message.body.decode()
                async with database.transaction(connection):
                    await at.insert(order)
                with suppress(ApplicationError):
                    async with database.transaction(connection):
                        await at.insert(f"{order}-not")
                        raise ApplicationError
                await at.execute("SET CONSTRAINTS ALL IMMEDIATE")

            async with await client.consumer(fresh("g"), [topic]) as consumer:
                connect = partial(database.connect, world.dsn)
                await AioFace().drain(client, consumer, handle, inbox=connect)
                assert (consumer.stats.nacked, consumer.stats.acked) == (0, 4)
            assert world.orders() == {f"o-{n}" for n in range(4)}

    run(story())
