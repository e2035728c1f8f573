"""Connections of each driver behind one face, as a service uses them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, NamedTuple

import asyncpg
import psycopg
import psycopg2
from psycopg2.extensions import parse_dsn

from txmq.faces import run
from txmq.tx.postgres.drivers import driver_of


class Peer:
    """A service's connection: its statements, and txmq's driver of it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.driver = driver_of(connection)

    async def execute(self, statement: str) -> None:
        """Execute a statement as the service does."""
        if isinstance(self.connection, psycopg2.extensions.connection):
            with self.connection.cursor() as cursor:
                cursor.execute(statement)
            return
        found = self.connection.execute(statement)
        if inspect.isawaitable(found):
            await found

    async def close(self) -> None:
        closing = self.connection.close()
        if inspect.isawaitable(closing):
            with suppress(Exception):
                await closing


class DriverKind(NamedTuple):
    """A driver: how to connect, how to run a coroutine over it, and what a pooler of
    transactions needs.
    """

    name: str
    connect: Callable[..., Awaitable[Any]]
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    pooled: dict[str, Any]


def arguments(dsn: str) -> dict[str, Any]:
    """Return the arguments of asyncpg's `connect()`."""
    known = parse_dsn(dsn)
    names = {"dbname": "database"}
    return {names.get(name, name): value for name, value in known.items()}


async def _psycopg2(dsn: str, **options: Any) -> Any:
    return psycopg2.connect(dsn, **options)


async def _psycopg(dsn: str, **options: Any) -> Any:
    return psycopg.connect(dsn, **options)


async def _psycopg_async(dsn: str, **options: Any) -> Any:
    return await psycopg.AsyncConnection.connect(dsn, **options)


async def _asyncpg(dsn: str, **options: Any) -> Any:
    return await asyncpg.connect(**arguments(dsn), **options)


KINDS = (
    DriverKind("psycopg2", _psycopg2, run, {}),
    DriverKind("psycopg", _psycopg, run, {"prepare_threshold": None}),
    DriverKind("psycopg of asyncio", _psycopg_async, asyncio.run, {"prepare_threshold": None}),
    DriverKind("asyncpg", _asyncpg, asyncio.run, {"statement_cache_size": 0}),
)


def peer(kind: DriverKind, dsn: str, **options: Any) -> AbstractAsyncContextManager[Peer]:
    """Connect, and close in the end."""

    @asynccontextmanager
    async def opened() -> Any:
        found = Peer(await kind.connect(dsn, **options))
        try:
            yield found
        finally:
            await found.close()

    return opened()
