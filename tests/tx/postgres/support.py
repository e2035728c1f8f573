"""Tokens, queries, connections and roles for the tests with PostgreSQL."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread
from uuid import UUID

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name
from psycopg2.extensions import make_dsn, parse_dsn

from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.resolver import Check
from txmq.tx.postgres.session import connect

LOG = UUID("00000000-0000-4000-8000-000000000001")
OTHER_LOG = UUID("00000000-0000-4000-8000-000000000002")


def new_token(time_ms: int | None = None) -> UUID:
    """Return a UUIDv7 of `time_ms`, or of now."""
    stamp = time.time_ns() // 1_000_000 if time_ms is None else time_ms
    random = int.from_bytes(os.urandom(10), "big")
    fields = stamp << 80 | random
    return UUID(int=fields & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62)


def xid_of(connection: Connection) -> int:
    """Return the id of the open transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text::int8")
        [(xid,)] = cursor.fetchall()
        return int(xid)


def rows(dsn: str, statement: str, *values: object) -> list[tuple[object, ...]]:
    """Return the rows of a statement, on a connection of its own."""
    with (
        closing(connect(dsn, application_name="test")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement, values)
        return [] if cursor.description is None else cursor.fetchall()


def producer(dsn: str) -> Connection:
    """Return a connection as services have it, on which psycopg2 begins
    transactions.
    """
    return psycopg2.connect(dsn)


def identity_of(dsn: str) -> ServerIdentity:
    with closing(connect(dsn, application_name="test")) as connection:
        return read_server(connection).identity


def check_of(dsn: str, token: UUID, xid: int | None = None) -> Check:
    return Check(token, LOG, identity_of(dsn), xid, 1)


def backend_pid(connection: Connection) -> int:
    return connection.info.backend_pid


def wait_for_backend(server: PostgresServer, pid: int, condition: str) -> None:
    """Wait until the condition holds for the row of the backend in pg_stat_activity."""
    statement = f"SELECT 1 FROM pg_stat_activity WHERE pid = %s AND {condition}"
    wait_until(lambda: rows(server.dsn(), statement, pid), what=f"backend {pid}: {condition}")


def blocked_thread(server: PostgresServer, connection: Connection, statement: str) -> Thread:
    """Run a statement in a thread, and return once it waits for a lock."""

    def run() -> None:
        with pytest.raises(psycopg2.Error), connection.cursor() as cursor:
            cursor.execute(statement)

    thread = Thread(target=run)
    pid = backend_pid(connection)
    thread.start()
    wait_for_backend(server, pid, "wait_event_type = 'Lock'")
    return thread


@contextmanager
def poor_role(dsn: str, name: str = "poor") -> Iterator[tuple[str, str]]:
    """Create a role without rights, and yield its name and a DSN for it."""
    role = f"{parse_dsn(dsn)['dbname']}_{name}"
    rows(dsn, f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    yield role, make_dsn(dsn, user=role, password="x")
    rows(dsn, f"DROP OWNED BY {role}; DROP ROLE {role}")
