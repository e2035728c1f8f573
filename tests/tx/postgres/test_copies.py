"""Faults 95 and 96: a physical copy of a database decides nothing."""

from __future__ import annotations

from contextlib import closing
from uuid import UUID, uuid4

import pytest

from tests.fixtures_postgres import create_database, cut_off
from tests.tx.postgres.support import new_token, producer, rows
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN
from txmq.testing.postgres_server import OwnServer
from txmq.tx.postgres.blocking import insert_token, read_server
from txmq.tx.postgres.identity import Server, ServerIdentity, TimelineHistory
from txmq.tx.postgres.resolver import Answer, Check, TokenResolver
from txmq.tx.postgres.session import connect

LOG = uuid4()


@pytest.fixture
def name(crashable_postgres: OwnServer) -> str:
    """The name of a database with the tables of txmq, made before any copy."""
    return create_database(crashable_postgres)


def server_of(dsn: str) -> Server:
    with closing(connect(dsn, application_name="test")) as connection:
        return read_server(connection)


def commit(dsn: str) -> UUID:
    token = new_token()
    with closing(producer(dsn)) as connection:
        insert_token(connection, token, [LOG])
        connection.commit()
    return token


def run_on(dsn: str) -> None:
    """Let the server's log run on to another segment."""
    rows(dsn, "CREATE TABLE IF NOT EXISTS run_on ()")
    rows(dsn, "SELECT pg_switch_wal()")
    rows(dsn, "CREATE TABLE run_on_again ()")


def ask(dsn: str, server: Server, *tokens: UUID) -> list[Answer]:
    checks = [Check(token, LOG, server.identity, None, server.position) for token in tokens]
    with closing(TokenResolver(dsn)) as resolver:
        return resolver.resolve(checks)


def test_a_copy_on_the_same_timeline_decides_nothing_that_it_is_behind_of(
    crashable_postgres: OwnServer, name: str, copy: OwnServer
) -> None:
    original, copied = crashable_postgres.dsn(name), copy.dsn(name)
    run_on(original)
    server = server_of(original)
    assert server.identity == server_of(copied).identity
    committed, absent = commit(original), new_token()
    answers = ask(copied, server, committed, absent)
    assert [answer.verdict for answer in answers] == [UNKNOWN, UNKNOWN]
    assert "it is a copy" in answers[0].reason
    assert rows(copied, "SELECT FROM public.txmq_token") == []
    answers = ask(original, server, committed, absent)
    assert [answer.verdict for answer in answers] == [COMMIT, ROLLBACK]


def test_a_promoted_clone_decides_only_what_came_before_the_timelines_parted(
    crashable_postgres: OwnServer, name: str, standby: OwnServer
) -> None:
    original, clone = crashable_postgres.dsn(name), standby.dsn(name)
    before = server_of(original)
    cut_off(crashable_postgres, standby)
    standby.execute("SELECT pg_promote()")
    run_on(original)
    behind = server_of(original)
    committed = commit(original)
    [answer] = ask(clone, behind, committed)
    assert (answer.verdict, "a copy was promoted" in answer.reason) == (UNKNOWN, True)
    assert rows(clone, "SELECT FROM public.txmq_token") == []
    [answer] = ask(clone, before, new_token())
    assert answer.verdict is ROLLBACK
    [answer] = ask(original, behind, committed)
    assert answer.verdict is COMMIT


def test_a_history_that_cannot_be_read_decides_nothing(
    crashable_postgres: OwnServer, name: str, standby: OwnServer
) -> None:
    before = server_of(crashable_postgres.dsn(name))
    cut_off(crashable_postgres, standby)
    standby.execute("SELECT pg_promote()")
    function = "public.txmq_timeline_history(int)"
    body = "$$ SELECT (1 / 0)::text $$"  # without the function, a superuser reads the file
    rows(
        standby.dsn(name),
        f"CREATE OR REPLACE FUNCTION {function} RETURNS text LANGUAGE sql AS {body}",
    )
    [answer] = ask(standby.dsn(name), before, new_token())
    assert (answer.verdict, "txmq_timeline_history" in answer.reason) == (UNKNOWN, True)


def test_a_timeline_of_another_branch_does_not_succeed() -> None:
    decider = ServerIdentity(7, 2, 5)
    branch = TimelineHistory(3, {1: 100})
    assert "does not come from 2" in branch.why_not(decider, 50)
    straight = TimelineHistory(3, {1: 100, 2: 200})
    assert (straight.why_not(decider, 200), straight.why_not(decider, 201) != "") == ("", True)
