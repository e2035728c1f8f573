"""What the tests here share: tokens, questions to a database, a producer's side of a
transaction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread
from uuid import UUID

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn, parse_dsn

from txmq.testing.postgres import PostgresServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.identity import ServerIdentity, read_server
from txmq.tx.postgres.resolver import Check
from txmq.tx.postgres.session import connect

LOG = UUID("00000000-0000-4000-8000-000000000001")
OTHER_LOG = UUID("00000000-0000-4000-8000-000000000002")


def new_token(time_ms: int | None = None) -> UUID:
    """A UUIDv7 of `time_ms`, or of now."""
    stamp = time.time_ns() // 1_000_000 if time_ms is None else time_ms
    random = int.from_bytes(os.urandom(10), "big")
    fields = stamp << 80 | random
    return UUID(int=fields & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62)


def xid_of(connection: Connection) -> int:
    """The id of the open transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text::int8")
        [(xid,)] = cursor.fetchall()
        return int(xid)


def rows(dsn: str, statement: str, *values: object) -> list[tuple[object, ...]]:
    """What `statement` gives on a connection of its own."""
    with (
        closing(connect(dsn, application_name="test")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement, values)
        return [] if cursor.description is None else cursor.fetchall()


def producer(dsn: str) -> Connection:
    """A connection as a service has it: psycopg2 begins transactions by itself."""
    return psycopg2.connect(dsn)


def identity_of(dsn: str) -> ServerIdentity:
    with closing(connect(dsn, application_name="test")) as connection:
        return read_server(connection).identity


def check_of(dsn: str, token: UUID, xid: int | None = None) -> Check:
    return Check(token, LOG, identity_of(dsn), xid)


def backend(connection: Connection) -> int:
    return connection.info.backend_pid


def wait_for_backend(server: PostgresServer, pid: int, condition: str) -> None:
    """Returns once `condition` holds for the backend's row in pg_stat_activity."""
    statement = f"SELECT 1 FROM pg_stat_activity WHERE pid = %s AND {condition}"
    wait_until(lambda: rows(server.dsn(), statement, pid), what=f"backend {pid}: {condition}")


def waiting(server: PostgresServer, connection: Connection, statement: str) -> Thread:
    """Runs `statement` in a thread; returns when it waits for a lock."""

    def run() -> None:
        with pytest.raises(psycopg2.Error), connection.cursor() as cursor:
            cursor.execute(statement)

    thread = Thread(target=run)
    pid = backend(connection)
    thread.start()
    wait_for_backend(server, pid, "wait_event_type = 'Lock'")
    return thread


@contextmanager
def poor_role(dsn: str, name: str = "poor") -> Iterator[tuple[str, str]]:
    """A role without any rights, and `dsn` for it."""
    role = f"{parse_dsn(dsn)['dbname']}_{name}"
    rows(dsn, f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    yield role, make_dsn(dsn, user=role, password="x")
    rows(dsn, f"DROP OWNED BY {role}; DROP ROLE {role}")
