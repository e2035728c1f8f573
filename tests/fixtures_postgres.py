"""Fixtures of PostgreSQL: one server for the session, a database with txmq's tables for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from psycopg2.extensions import connection as Connection  # noqa: N812 (a class, whatever its name)

from txmq.testing.postgres import OwnServer, PostgresServer, any_server, temporary_server
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import connect

Connect = Callable[..., Connection]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server that many tests share: they may not crash it. TXMQ_TEST_DSN names it, else it is a temporary one."""
    with any_server() as server:
        yield server


@pytest.fixture(scope="session")
def crashable_postgres() -> Iterator[OwnServer]:
    """A temporary server that tests may kill; each leaves it running."""
    with temporary_server() as server:
        yield server


@pytest.fixture(scope="session")
def template(postgres: PostgresServer) -> str:
    """A database with txmq's tables that nobody is connected to: new ones are copies of it."""
    return with_tables(postgres)


@pytest.fixture
def empty_database(postgres: PostgresServer) -> Iterator[str]:
    """The DSN of a new database without tables."""
    name = postgres.create_database()
    yield postgres.dsn(name)
    postgres.drop_database(name)


@pytest.fixture
def database(postgres: PostgresServer, template: str) -> Iterator[str]:
    """The DSN of a new database with txmq's tables."""
    name = postgres.create_database(template=template)
    yield postgres.dsn(name)
    postgres.drop_database(name)


@pytest.fixture
def crashable_database(crashable_postgres: OwnServer) -> str:
    """The DSN of a new database with txmq's tables on the server that may be killed."""
    return crashable_postgres.dsn(with_tables(crashable_postgres))


def with_tables(server: PostgresServer) -> str:
    name = server.create_database()
    with closing(connect(server.dsn(name), application_name="fixtures")) as connection:
        install(connection)
    return name
