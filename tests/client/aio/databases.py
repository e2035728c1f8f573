"""Connections of each driver that transactions on asyncio take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, ClassVar

import psycopg
import psycopg2

import txmq.asyncpg
import txmq.psycopg

asyncpg: Any = import_module("asyncpg")  # which has no types


class Database(ABC):
    """A driver, as tests use it. `error`: the class of its errors."""

    error: ClassVar[type[Exception]]

    @abstractmethod
    async def connect(self, dsn: str) -> Any:
        """Open a connection."""

    @abstractmethod
    async def connect_enlisting(self, dsn: str) -> Any:
        """Open a connection whose own COMMIT takes messages along."""

    @abstractmethod
    def transaction(self, connection: Any) -> AbstractAsyncContextManager[Any]:
        """Return the driver's own block of a transaction."""

    @abstractmethod
    async def execute(self, connection: Any, statement: str) -> None:
        """Execute a statement."""

    @abstractmethod
    async def close(self, connection: Any) -> None:
        """Close the connection, whatever became of it."""


class Psycopg(Database):
    """psycopg 3."""

    error = psycopg.Error

    async def connect(self, dsn: str) -> Any:
        return await psycopg.AsyncConnection.connect(dsn)

    async def connect_enlisting(self, dsn: str) -> Any:
        return await txmq.psycopg.AsyncEnlistConnection.connect(dsn)

    def transaction(self, connection: Any) -> AbstractAsyncContextManager[Any]:
        block: AbstractAsyncContextManager[Any] = connection.transaction()
        return block

    async def execute(self, connection: Any, statement: str) -> None:
        await connection.execute(statement)

    async def close(self, connection: Any) -> None:
        await connection.close()


class Asyncpg(Database):
    """asyncpg."""

    error = asyncpg.PostgresError

    async def connect(self, dsn: str) -> Any:
        return await asyncpg.connect(**_settings(dsn))

    async def connect_enlisting(self, dsn: str) -> Any:
        kind = txmq.asyncpg.EnlistConnection
        return await asyncpg.connect(**_settings(dsn), connection_class=kind)

    def transaction(self, connection: Any) -> AbstractAsyncContextManager[Any]:
        block: AbstractAsyncContextManager[Any] = connection.transaction()
        return block

    async def execute(self, connection: Any, statement: str) -> None:
        await connection.execute(statement)

    async def close(self, connection: Any) -> None:
        connection.terminate()


def _settings(dsn: str) -> dict[str, Any]:
    names = {"dbname": "database"}
    settings = psycopg2.extensions.parse_dsn(dsn)
    # Where its TLS handshake is cancelled, asyncpg leaves a failed future behind.
    return {names.get(name, name): value for name, value in settings.items()} | {"ssl": False}


DATABASES: dict[str, Database] = {"psycopg": Psycopg(), "asyncpg": Asyncpg()}
