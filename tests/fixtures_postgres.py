"""Fixtures of PostgreSQL: a server per session, and a database with txmq's tables per
test.

The servers run with fsync off, and in memory where there is room. The tests kill
processes, not the machine: the kernel keeps what a process has written, with or without
fsync.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from unittest.mock import patch

import psycopg2
import pytest

from txmq.testing.postgres_binaries import find_binaries, server_identity
from txmq.testing.postgres_server import (
    LOGICAL,
    PREFIX,
    OwnServer,
    PostgresServer,
    any_server,
    temporary_server,
)
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import SETTINGS, connect

MEMORY = Path("/dev/shm")
ROOM = 8 << 30  # bytes; all servers and their copies have about two
# Removes the rows and tables of tests. Connections that were left open go first,
# because they may hold locks.
CLEAN = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
DO $$
DECLARE
    own regclass;
BEGIN
    FOR own IN SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace
        AND relkind IN ('r', 'p', 'v') AND relname NOT LIKE 'txmq%'
    LOOP
        EXECUTE format('DROP TABLE %s CASCADE', own);
    END LOOP;
END $$;
DELETE FROM public.txmq_token;
DELETE FROM public.txmq_broker;
DELETE FROM public.txmq_outbox;
DELETE FROM public.txmq_outbox_floor;
DELETE FROM public.txmq_inbox_recent;
DELETE FROM public.txmq_inbox;
"""
FINGERPRINT = """
SELECT (SELECT array_agg(concat_ws(' ', oid, relname, relacl) ORDER BY oid)
        FROM pg_class WHERE oid >= 16384),
       (SELECT array_agg(concat_ws(' ', oid, proacl, prosrc) ORDER BY oid)
        FROM pg_proc WHERE oid >= 16384),
       (SELECT array_agg(concat_ws(' ', oid, nspname) ORDER BY oid)
        FROM pg_namespace WHERE oid >= 16384),
       (SELECT array_agg(pubname) FROM pg_publication),
       (SELECT count(*) FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase
        WHERE d.datname = current_database()),
       (SELECT version FROM public.txmq_schema)
"""


class Databases:
    """Copies of a database with txmq's tables.

    A copy is reused where a test has left only rows and tables behind.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._template = create_database(server)
        self._fingerprint = self._fingerprint_of(self._template)
        self._clean: list[str] = []

    def borrow(self) -> str:
        """Return the name of a clean database."""
        return (
            self._clean.pop()
            if self._clean
            else self._server.create_database(template=self._template)
        )

    def give_back(self, name: str) -> None:
        try:
            as_new = self._fingerprint_of(name, CLEAN) == self._fingerprint
        except psycopg2.Error:
            as_new = False  # the tables of txmq are dropped or inaccessible
        if as_new:
            self._clean.append(name)
        else:
            self._server.drop_database(name)

    def _fingerprint_of(self, name: str, before: str = "") -> list[tuple[object, ...]]:
        with closing(self._server.connect(name)) as connection, connection.cursor() as cursor:
            cursor.execute(before + FINGERPRINT)
            return cursor.fetchall()


@cache
def memory_or_disk() -> Path | None:
    """Return where servers are to be, None for the directory of temporary files.

    In memory their files cost a third less of the kernel's time.
    """
    try:
        room = shutil.disk_usage(MEMORY).free
    except OSError:
        return None
    return MEMORY if room > ROOM and os.access(MEMORY, os.W_OK) else None


@pytest.fixture(autouse=True, scope="session")
def patient_connections() -> Iterator[None]:
    """Have txmq's own connections of this process wait for a busy server."""
    with patch.dict(SETTINGS, connect_timeout=str(int(PATIENCE_S))):
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for many tests, which may not crash it.

    TXMQ_TEST_DSN names it, else it is temporary.
    """
    with any_server(fsync=False, parent=memory_or_disk()) as server:
        yield server


@pytest.fixture(scope="session")
def crashable_postgres() -> Iterator[OwnServer]:
    """A temporary server that tests may kill; each test leaves it running."""
    with temporary_server(fsync=False, parent=memory_or_disk()) as server:
        yield server


@pytest.fixture(scope="session")
def logical_postgres() -> Iterator[OwnServer]:
    """A temporary server with logical decoding, which tests may kill.

    Each test leaves it running without slots.
    """
    with temporary_server(fsync=False, settings=LOGICAL, parent=memory_or_disk()) as server:
        yield server


@pytest.fixture(scope="session")
def logical_databases(logical_postgres: OwnServer) -> Databases:
    """The databases for `logical_database`."""
    return Databases(logical_postgres)


@pytest.fixture
def logical_database(logical_postgres: OwnServer, logical_databases: Databases) -> Iterator[str]:
    """The DSN of a database with empty tables of txmq on that server.

    Its slots are dropped with it.
    """
    name = logical_databases.borrow()
    yield logical_postgres.dsn(name)
    logical_postgres.drop_slots()
    logical_databases.give_back(name)


@pytest.fixture(scope="session")
def databases(postgres: PostgresServer) -> Databases:
    """The databases for `database`, and for tests that need several."""
    return Databases(postgres)


@pytest.fixture
def empty_database(postgres: PostgresServer) -> Iterator[str]:
    """The DSN of a new database without tables."""
    name = postgres.create_database()
    yield postgres.dsn(name)
    postgres.drop_database(name)


@pytest.fixture
def database(postgres: PostgresServer, databases: Databases) -> Iterator[str]:
    """The DSN of a database with empty tables of txmq."""
    name = databases.borrow()
    yield postgres.dsn(name)
    databases.give_back(name)


@pytest.fixture
def standby(crashable_postgres: OwnServer) -> Iterator[OwnServer]:
    """A standby that follows the crashable server."""
    with copied(crashable_postgres, "-R") as server:
        yield server


@pytest.fixture
def copy(crashable_postgres: OwnServer) -> Iterator[OwnServer]:
    """A running copy of the crashable server as it is now, on the same timeline."""
    with copied(crashable_postgres) as server:
        yield server


@contextmanager
def copied(original: OwnServer, *options: str) -> Iterator[OwnServer]:
    """Run a physical copy of a server, made with these options of pg_basebackup."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory_or_disk()))
    shutil.copy(original.directory / "password", directory)
    server = OwnServer(directory, fsync=False, temporary=True)
    program = find_binaries(directory).directory / "pg_basebackup"
    place: list[str | Path] = [program, "-D", directory / "data", "-d", original.dsn()]
    backup = [*place, "-X", "stream", "-c", "fast", "--no-sync", *options]
    subprocess.run(backup, check=True, cwd=directory, timeout=PATIENCE_S, **server_identity())
    with server.start():
        yield server


def wait_for_replay(primary: OwnServer, standby: OwnServer) -> None:
    """Wait until the standby has replayed all that the primary has written."""
    with closing(primary.connect()) as ours, closing(standby.connect()) as theirs:
        with ours.cursor() as cursor:
            cursor.execute("SELECT pg_current_wal_lsn()::text")
            [end] = cursor.fetchall()

        def replayed() -> bool:
            with theirs.cursor() as cursor:
                cursor.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", end)
                return bool(cursor.fetchall()[0][0])

        wait_until(replayed, what="the standby has caught up")


def cut_off(primary: OwnServer, standby: OwnServer) -> None:
    """Cut the standby off from its primary."""
    standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
    standby.execute("SELECT pg_reload_conf()")
    streaming = "SELECT FROM pg_stat_replication WHERE application_name = 'walreceiver'"

    def following() -> int:
        with closing(primary.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(streaming)
            return cursor.rowcount

    wait_until(lambda: not following(), what="no standby follows the primary")


@pytest.fixture
def crashable_database(crashable_postgres: OwnServer) -> Iterator[str]:
    """The DSN of a new database with txmq's tables on a server that may be killed."""
    name = create_database(crashable_postgres)
    yield crashable_postgres.dsn(name)
    # Copies of the server are the smaller. One with prepared transactions stays.
    with suppress(psycopg2.Error):
        crashable_postgres.drop_database(name)


def create_database(server: PostgresServer) -> str:
    """Create a database with txmq's tables; return its name."""
    name = server.create_database()
    with closing(connect(server.dsn(name), application_name="fixtures")) as connection:
        install(connection)
    return name
