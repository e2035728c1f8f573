"""Faults 49 and 53: a promoted standby decides, and the server left behind does not."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from tests.fixtures_postgres import create_database
from tests.tx.postgres.support import identity_of, producer, rows
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import TokenFenced
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN
from txmq.testing.postgres_binaries import find_binaries, server_identity
from txmq.testing.postgres_server import PREFIX, OwnServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.resolver import Answer, Check, TokenResolver
from txmq.tx.postgres.tokens import insert_token

LOG = uuid4()


@pytest.fixture
def standby(crashable_postgres: OwnServer) -> Iterator[OwnServer]:
    """A standby that follows the server."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    shutil.copy(crashable_postgres.directory / "password", directory)
    server = OwnServer(directory, fsync=False, temporary=True)
    program = find_binaries(directory).directory / "pg_basebackup"
    backup: list[str | Path] = [
        program,
        "-D",
        directory / "data",
        "-d",
        crashable_postgres.dsn(),
        "-R",
        "-X",
        "stream",
        "-c",
        "fast",
    ]
    subprocess.run(
        [*backup, "--no-sync"], check=True, cwd=directory, timeout=100, **server_identity()
    )
    with server.start():
        yield server


@pytest.fixture
def name(crashable_postgres: OwnServer) -> Iterator[str]:
    """The name of a database with the tables of txmq."""
    made = create_database(crashable_postgres)
    yield made
    crashable_postgres.drop_database(made)


def commit(dsn: str, token: UUID) -> None:
    with closing(producer(dsn)) as connection:
        insert_token(connection, token, [LOG])
        connection.commit()


def ask(dsn: str, decider: ServerIdentity, *tokens: UUID) -> list[Answer]:
    resolver = TokenResolver(dsn)
    try:
        return resolver.resolve([Check(token, LOG, decider) for token in tokens])
    finally:
        resolver.close()


def cut_off(primary: OwnServer, standby: OwnServer) -> None:
    """Cut the standby off from its primary."""
    standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
    standby.execute("SELECT pg_reload_conf()")
    streaming = "SELECT FROM pg_stat_replication WHERE application_name = 'walreceiver'"
    wait_until(lambda: not rows(primary.dsn(), streaming), what="no standby follows the primary")


def test_a_promoted_standby_decides_by_its_own_rows(
    crashable_postgres: OwnServer, name: str, standby: OwnServer
) -> None:
    primary, old, new = crashable_postgres, crashable_postgres.dsn(name), standby.dsn(name)
    before = identity_of(old)
    replicated, lost, after = new_token(), new_token(), new_token()
    commit(old, replicated)
    [(place,)] = rows(old, "SELECT pg_current_wal_lsn()::text")
    with closing(standby.connect(name)) as connection, connection.cursor() as cursor:

        def caught_up() -> bool:
            cursor.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (place,))
            return bool(cursor.fetchall()[0][0])

        wait_until(caught_up, 60, what="the standby has caught up")
    assert [answer.verdict for answer in ask(new, before, replicated, lost)] == [UNKNOWN, UNKNOWN]
    cut_off(primary, standby)
    commit(old, lost)  # acknowledged, and gone with the failover
    standby.execute("SELECT pg_promote()")
    promoted = identity_of(new)
    assert promoted == before._replace(timeline=before.timeline + 1)
    assert [answer.verdict for answer in ask(new, before, replicated, lost)] == [COMMIT, ROLLBACK]
    with closing(producer(new)) as late, pytest.raises(TokenFenced):
        insert_token(late, lost, [LOG])
    commit(new, after)
    [behind] = ask(old, promoted, after)
    assert behind.verdict is UNKNOWN
    assert "behind the transaction's" in behind.reason
    assert [answer.verdict for answer in ask(new, promoted, after)] == [COMMIT]
