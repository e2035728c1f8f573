"""A killed server: commits that were not on disk are lost, and their xids are used
again.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest

from tests.freezing import freeze
from tests.tx.postgres.support import LOG, check_of, new_token, producer, rows, xid_of
from txmq.errors import InDoubt
from txmq.model.message import Decision
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import guarded_commit, insert_token
from txmq.tx.postgres.resolver import Answer, Check, ResolverPolicy, TokenResolver

QUICK = ResolverPolicy(first_pause_s=0.01, longest_pause_s=0.05)


def hold_back_the_wal(server: OwnServer) -> int:
    """Stop the process that would write asynchronous commits, and return its pid."""
    [(found,)] = rows(
        server.dsn(), "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
    )
    pid = int(str(found))
    freeze(pid)
    return pid


def let_it_die(pid: int) -> None:
    """Continue a stopped process once it has received SIGQUIT, so that it writes
    nothing more.
    """
    quit_pending = re.compile(r"^ShdPnd:\s*[0-9a-f]*[4-7c-f]$", re.MULTILINE)
    wait_until(
        lambda: quit_pending.search(Path(f"/proc/{pid}/status").read_text()),
        what=f"{pid} has received SIGQUIT",
    )
    os.kill(pid, signal.SIGCONT)


def lost_commit(dsn: str) -> Check:
    """Commit a transaction with a token without waiting for the disk."""
    token = new_token()
    with closing(producer(dsn)) as connection:
        with connection.cursor() as cursor:
            cursor.execute("SET synchronous_commit = off")
        insert_token(connection, token, [LOG], allow_weak_commit=True)
        xid = xid_of(connection)
        guarded_commit(connection, token)
    return check_of(dsn, token, xid)


def reuse(dsn: str, xid: int | None) -> None:
    """Commit unrelated transactions until this xid was given out again, to one of them
    or of the server's own.
    """
    with closing(producer(dsn)) as connection, connection.cursor() as cursor:
        for _ in range(1000):
            cursor.execute(
                "CREATE TABLE IF NOT EXISTS unrelated (n int); INSERT INTO unrelated VALUES (1)"
            )
            cursor.execute("SELECT pg_current_xact_id()::text::int8")
            [(current,)] = cursor.fetchall()
            connection.commit()
            if xid is not None and current >= xid:
                return
    raise AssertionError(f"xid {xid} was not given out again")


def decided(dsn: str, check: Check) -> Answer:
    """Wait for an answer of the resolver, and return it."""
    answers: list[Answer] = []

    def asked() -> bool:
        answers[:] = resolver.resolve([check])
        return answers[0].verdict is not Decision.UNKNOWN

    with closing(TokenResolver(dsn, policy=QUICK)) as resolver:
        wait_until(asked, what=f"an answer for {check}")
    return answers[0]


def crash(server: OwnServer, way: str, stopped: int) -> None:
    """Kill the whole server, or one backend, after which the postmaster recovers by
    itself.
    """
    if way == "server":
        server.kill_server()
        server.start()
    else:
        with closing(server.connect()) as victim, closing(server.connect()) as witness:
            server.kill_backend(victim.info.backend_pid)
            let_it_die(stopped)
            wait_until(lambda: not answers(witness), what="the server has thrown out its backends")
        wait_until(server.accepts_connections, what="the server is back")


def answers(connection: psycopg2.extensions.connection) -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except psycopg2.Error:
        return False
    return True


@pytest.mark.parametrize("way", ["server", "backend"])
def test_the_row_decides_and_not_the_xid_of_a_lost_commit(
    crashable_postgres: OwnServer, crashable_database: str, way: str
) -> None:
    stopped = hold_back_the_wal(crashable_postgres)
    check = lost_commit(crashable_database)
    crash(crashable_postgres, way, stopped)
    reuse(crashable_database, check.xid)
    assert rows(crashable_database, "SELECT pg_xact_status(%s::text::xid8)", check.xid) == [
        ("committed",)
    ]
    assert decided(crashable_database, check).verdict is Decision.ROLLBACK


def test_an_answer_makes_its_commit_durable(
    crashable_postgres: OwnServer, crashable_database: str
) -> None:
    stopped = hold_back_the_wal(crashable_postgres)
    check = lost_commit(crashable_database)
    assert decided(crashable_database, check).verdict is Decision.COMMIT
    crash(crashable_postgres, "server", stopped)
    assert decided(crashable_database, check).verdict is Decision.COMMIT


def test_a_fence_outlives_a_crash(crashable_postgres: OwnServer, crashable_database: str) -> None:
    check = check_of(crashable_database, new_token())
    assert decided(crashable_database, check).verdict is Decision.ROLLBACK
    crashable_postgres.kill_server()
    crashable_postgres.start()
    assert rows(crashable_database, "SELECT state FROM txmq_token") == [("R",)]


def test_a_crash_in_the_middle_of_commit_is_in_doubt_and_then_decided(
    crashable_postgres: OwnServer, crashable_database: str
) -> None:
    token = new_token()
    check = check_of(crashable_database, token)
    with closing(producer(crashable_database)) as connection:
        insert_token(connection, token, [LOG])
        crashable_postgres.kill_server()
        with pytest.raises(InDoubt):
            guarded_commit(connection, token)
        with closing(TokenResolver(crashable_database, policy=QUICK)) as resolver:
            [answer] = resolver.resolve([check])
            assert answer.verdict is Decision.UNKNOWN
            crashable_postgres.start()
            wait_until(lambda: resolver.resolve([check])[0].verdict is Decision.ROLLBACK)
