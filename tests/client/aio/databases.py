"""Connections of each driver that transactions on asyncio take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import psycopg
import psycopg2

asyncpg: Any = import_module("asyncpg")  # which has no types


class Database(ABC):
    """A driver, as tests use it."""

    @abstractmethod
    async def connect(self, dsn: str) -> Any:
        """Open a connection."""

    @abstractmethod
    async def execute(self, connection: Any, statement: str) -> None:
        """Execute a statement."""

    @abstractmethod
    async def close(self, connection: Any) -> None:
        """Close the connection, whatever became of it."""


class Psycopg(Database):
    """psycopg 3."""

    async def connect(self, dsn: str) -> Any:
        return await psycopg.AsyncConnection.connect(dsn)

    async def execute(self, connection: Any, statement: str) -> None:
        await connection.execute(statement)

    async def close(self, connection: Any) -> None:
        await connection.close()


class Asyncpg(Database):
    """asyncpg."""

    async def connect(self, dsn: str) -> Any:
        settings = psycopg2.extensions.parse_dsn(dsn)
        names = {"dbname": "database"}
        return await asyncpg.connect(
            **{names.get(name, name): value for name, value in settings.items()}
        )

    async def execute(self, connection: Any, statement: str) -> None:
        await connection.execute(statement)

    async def close(self, connection: Any) -> None:
        connection.terminate()


DATABASES: dict[str, Database] = {"psycopg": Psycopg()}
