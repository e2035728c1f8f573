"""A worker that places orders on asyncio, with psycopg 3 or asyncpg."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import asyncpg
import psycopg
from psycopg2.extensions import parse_dsn

import txmq.aio
from tests.system.order_worker import (
    CHECK_AFTER_S,
    NEVER,
    Abandoned,
    Journal,
    application_name,
)
from tests.system.orders import PlacedOrder, Token
from tests.system.supervisor import SupervisorConfig, WorkerSpec
from txmq.testing.wait import PATIENCE_S

KINDS = ("commits", "commits", "commits", "is abandoned", "swallows an error", "has a savepoint")
RAISE_VERSION = """
INSERT INTO account VALUES ('{}', 1)
ON CONFLICT (key) DO UPDATE SET version = account.version + 1 RETURNING version
"""


class Session:
    """A connection of either driver."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @property
    def closed(self) -> bool:
        own = self.connection
        return own.closed if isinstance(own, psycopg.AsyncConnection) else own.is_closed()

    async def fetch(self, statement: str) -> Any:
        """Execute a statement; return the first value of its rows, if it has any."""
        if not isinstance(self.connection, psycopg.AsyncConnection):
            return await self.connection.fetchval(statement)
        cursor = await self.connection.execute(statement)
        row = await cursor.fetchone() if cursor.description else None
        return row and row[0]

    async def close(self) -> None:
        if isinstance(self.connection, psycopg.AsyncConnection):
            await self.connection.close()
        else:
            self.connection.terminate()


async def connect(dsn: str, driver: str) -> Session:
    """Return a connection, as soon as a server accepts one."""
    name = application_name(os.getpid())
    known = {"database" if key == "dbname" else key: v for key, v in parse_dsn(dsn).items()}
    while True:
        with suppress(psycopg.OperationalError, asyncpg.PostgresError, OSError):
            if driver == "psycopg":
                return Session(await psycopg.AsyncConnection.connect(dsn, application_name=name))
            settings = {"application_name": name}
            return Session(await asyncpg.connect(**known, server_settings=settings))
        await asyncio.sleep(0.05)


def run_worker(
    config: SupervisorConfig, worker: WorkerSpec, keep_running: Callable[[], bool], driver: str
) -> None:
    """Place orders, and connect again after each lost connection."""
    asyncio.run(_run(config, worker, keep_running, driver))


async def _run(
    config: SupervisorConfig, worker: WorkerSpec, keep_running: Callable[[], bool], driver: str
) -> None:
    journal, random, keys = Journal(Path(config.directory)), Random(), cycle(worker.arguments)
    client = txmq.aio.connect(config.url, service="orders", timeout=PATIENCE_S, retries=20)
    async with client:
        while keep_running():
            session = await connect(config.dsn, driver)
            while keep_running() and not session.closed:
                await _place(client, session, config.topic, next(keys), journal, random)
            await session.close()


async def _place(
    client: txmq.aio.Client,
    session: Session,
    topic: str,
    key: str,
    journal: Journal,
    random: Random,
) -> None:
    """Place one order, and note its outcome."""
    transaction = client.transaction(
        session.connection, timeout=PATIENCE_S, check_after=CHECK_AFTER_S
    )
    token = transaction.token.hex
    with journal.recording(token):
        async with transaction:
            order = PlacedOrder(token, key, await _write_order(session, token, key))
            transaction.send(topic, order.encode(), key=key)
            await _vary(random.choice(KINDS), transaction, session, topic, order)


async def _write_order(session: Session, token: Token, key: str) -> int:
    version = int(await session.fetch(RAISE_VERSION.format(key)))
    await session.fetch(f"INSERT INTO placed VALUES ('{token}', '{key}', {version})")
    return version


async def _vary(
    kind: str,
    transaction: txmq.aio.PostgresTransaction,
    session: Session,
    topic: str,
    order: PlacedOrder,
) -> None:
    if kind == "is abandoned":
        raise Abandoned
    if kind == "swallows an error":
        with suppress(psycopg.DataError, asyncpg.DataError):
            await session.fetch("SELECT 1 / 0")
    if kind == "has a savepoint":
        with suppress(Abandoned):
            await _withdraw(transaction, topic, order)


async def _withdraw(
    transaction: txmq.aio.PostgresTransaction, topic: str, order: PlacedOrder
) -> None:
    async with transaction.savepoint():
        transaction.send(topic, order._replace(version=NEVER).encode(), key=order.key)
        raise Abandoned
