"""Calls of the resolver end, whatever stands in front of them: locks, a frozen backend
or a frozen server.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from psycopg2 import OperationalError, extensions

from tests.freezing import freeze
from tests.tx.postgres.support import LOG, blocked_thread, check_of, new_token, producer, rows
from txmq.model.message import Decision
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres import bounds
from txmq.tx.postgres.outbox import SetAside
from txmq.tx.postgres.resolver import Answer, ResolverPolicy, TokenResolver
from txmq.tx.postgres.session import connect

OUTBOX_ROW = """
INSERT INTO public.txmq_outbox (log_id, tok, service, messages, content)
VALUES (%s, %s, 's', 1, '')
"""
LOCK_TIMEOUT = "SELECT current_setting('lock_timeout')"


@pytest.fixture
def resolver(database: str) -> Iterator[TokenResolver]:
    with closing(TokenResolver(database)) as resolver:
        yield resolver


@contextmanager
def open_session(dsn: str, statement: str) -> Iterator[int]:
    """Leave a transaction with locks open, as a forgotten psql does; yield its
    backend's id.
    """
    with closing(producer(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        yield connection.info.backend_pid


def keep_up(resolver: TokenResolver) -> bool:
    return resolver.maintain(LOG, "b", lambda _database: None) is not None


def test_a_session_over_the_broker_s_row_holds_up_the_upkeep_only(
    database: str, resolver: TokenResolver
) -> None:
    assert keep_up(resolver)
    with open_session(database, "SELECT FROM public.txmq_broker FOR UPDATE") as pid:
        assert not keep_up(resolver)
        assert f"session {pid} " in resolver.blocked["upkeep"]
        assert resolver.resolve([check_of(database, new_token())]) == [Answer(Decision.ROLLBACK)]
        assert resolver.fetch(LOG, [], SetAside()) == []
        assert not resolver.failing
    assert keep_up(resolver)
    assert resolver.blocked == {}


def test_a_session_over_a_row_of_the_outbox_holds_up_the_outbox_only(
    database: str, resolver: TokenResolver
) -> None:
    rows(database, OUTBOX_ROW, str(LOG), str(new_token()))
    [row] = resolver.fetch(LOG, [], SetAside()) or []
    with open_session(database, "SELECT FROM public.txmq_outbox FOR UPDATE") as pid:
        assert resolver.fetch(LOG, [row.published], SetAside()) is None
        assert f"session {pid} " in resolver.blocked["outbox"]
        assert resolver.resolve([check_of(database, new_token())]) == [Answer(Decision.ROLLBACK)]
        assert not resolver.failing
    assert resolver.fetch(LOG, [row.published], SetAside()) == []
    assert resolver.blocked == {}


def test_a_session_over_the_tables_holds_up_no_call_for_long(
    database: str, resolver: TokenResolver
) -> None:
    with open_session(database, "LOCK TABLE public.txmq_broker, public.txmq_token"):
        assert not keep_up(resolver)
        [answer] = resolver.resolve([check_of(database, new_token())])
        assert (answer.verdict, answer.blocked) == (Decision.UNKNOWN, True)
    assert keep_up(resolver)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes for the block, in which statements have little time."""
    for pid in pids:
        freeze(pid)
    try:
        with patch.multiple(bounds, STATEMENT_S=0.1, CANCELLED_WITHIN_S=0.3):
            yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def backend_of(dsn: str) -> int:
    """Return the process of the resolver's backend."""
    [(pid,)] = rows(
        dsn,
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'txmq resolver'"
        " AND datname = current_database()",
    )
    assert isinstance(pid, int)
    return pid


def parent_of(pid: int) -> int:
    """Return the server's process of a backend."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_frozen_backend_is_left_for_another(crashable_database: str) -> None:
    check = check_of(crashable_database, new_token())
    policy = ResolverPolicy(first_pause_s=0.0, longest_pause_s=0.0)
    with closing(TokenResolver(crashable_database, policy=policy)) as resolver:
        resolver.probe()
        with stopped(backend_of(crashable_database)):
            [answer] = resolver.resolve([check])
            assert answer.verdict is Decision.UNKNOWN
            assert resolver.failing
            wait_until(lambda: resolver.resolve([check]) == [Answer(Decision.ROLLBACK)])
        assert not resolver.failing


def test_a_frozen_server_freezes_neither_the_call_nor_the_process(crashable_database: str) -> None:
    check = check_of(crashable_database, new_token())
    dsn = extensions.make_dsn(crashable_database, connect_timeout="2")
    policy = ResolverPolicy(first_pause_s=0.0, longest_pause_s=0.0)
    with closing(TokenResolver(dsn, policy=policy)) as resolver:
        resolver.probe()
        backend = backend_of(crashable_database)
        with stopped(parent_of(backend), backend):
            for _ in range(2):  # on its connection, and as it connects again
                [answer] = resolver.resolve([check])
                assert answer.verdict is Decision.UNKNOWN
            assert resolver.failing
        wait_until(lambda: resolver.resolve([check]) == [Answer(Decision.ROLLBACK)])


def test_the_limits_of_a_statement_end_with_it(database: str) -> None:
    with (
        closing(
            connect(database, application_name="t", cursor_factory=bounds.BoundedCursor)
        ) as connection,
        connection.cursor() as bounded,
        connection.cursor(cursor_factory=extensions.cursor) as plain,
    ):
        for cursor, found in ((bounded, "500ms"), (plain, "0")):
            cursor.execute(LOCK_TIMEOUT)
            assert cursor.fetchall() == [(found,)]
        assert connection.notices == []


def test_each_statement_ends_at_its_own_deadline(
    database: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread watches all of them; the later begun may be due first."""
    monkeypatch.setattr(bounds, "CANCELLED_WITHIN_S", PATIENCE_S)  # so that nothing is cut
    with (
        closing(connect(database, application_name="patient")) as patient,
        closing(connect(database, application_name="hasty")) as hasty,
        bounds.bounded(patient, 3600),
        patient.cursor() as cursor,
    ):
        cursor.execute("SELECT pg_advisory_lock(1)")
        for _ in range(2):
            waiting = blocked_thread(postgres, hasty, "SELECT pg_advisory_lock(1)")
            with bounds.bounded(hasty, 0.1):
                waiting.join()
        assert not hasty.closed
        cursor.execute("SELECT 1")


def test_statements_of_a_forked_process_are_bounded(database: str) -> None:
    with closing(connect(database, application_name="parent")) as parent, bounds.bounded(parent, 9):
        child = os.fork()
        if not child:
            hasty = connect(database, application_name="child")
            try:
                with bounds.bounded(hasty, 0.1), hasty.cursor() as cursor:
                    cursor.execute("SELECT pg_sleep(3600)")
            except OperationalError:  # cancelled, or cut before it had begun
                os._exit(3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
