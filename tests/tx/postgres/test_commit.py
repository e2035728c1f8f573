"""`guarded_commit` reports only proven commits, and leaves psycopg2 in step with the
server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress

import psycopg2
import pytest
from psycopg2 import extensions

import txmq.tx.postgres.commit as subject
from tests.tx.postgres.business_table import assert_ready, business_rows, run
from tests.tx.postgres.support import LOG, backend_pid, new_token, producer, rows
from txmq.errors import DatabaseConflict, InDoubt, LocalProtocolError, TransactionAborted
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import guarded_commit, insert_token
from txmq.tx.postgres.session import Connection

TOKEN = new_token()


@pytest.fixture(params=["psycopg2 begins", "BEGIN by hand", "tpc_begin"])
def connection(database: str, request: pytest.FixtureRequest) -> Iterator[Connection]:
    """An open transaction, for each way to begin one."""
    rows(database, "CREATE TABLE business (n int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)")
    with closing(producer(database)) as connection:
        if request.param == "BEGIN by hand":
            connection.autocommit = True
            run(connection, "BEGIN")
        elif request.param == "tpc_begin":
            connection.tpc_begin("one phase")
        run(connection, "INSERT INTO business VALUES (1)")
        yield connection


def test_rows_are_committed_when_guarded_commit_returns(
    connection: Connection, database: str
) -> None:
    assert guarded_commit(connection, TOKEN)
    assert business_rows(database) == [(1,)]
    assert_ready(connection, database)


def test_the_servers_log_is_not_filled_with_warnings(connection: Connection) -> None:
    connection.notices.append("an earlier notice")
    guarded_commit(connection, TOKEN)
    assert connection.notices == ["an earlier notice"]


def test_a_swallowed_error_is_an_abort(connection: Connection, database: str) -> None:
    with suppress(psycopg2.Error):
        run(connection, "SELECT 1 / 0")
    with pytest.raises(TransactionAborted) as raised:
        guarded_commit(connection, TOKEN)
    assert raised.value.outcome == "not done"
    assert business_rows(database) == []
    assert_ready(connection, database)


async def believed(*_: object) -> None:
    """Take any transaction for healthy."""


def test_a_tag_other_than_commit_is_an_abort(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_require_healthy", believed)
    with closing(producer(database)) as connection:
        connection.autocommit = True
        run(connection, "BEGIN")
        with suppress(psycopg2.Error):
            run(connection, "SELECT 1 / 0")
        with pytest.raises(TransactionAborted, match="ROLLBACK"):
            guarded_commit(connection, TOKEN)
        assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE


@pytest.mark.parametrize("way", ["savepoint", "function", "cancelled while idle"])
def test_errors_outside_the_transaction_do_not_prevent_its_commit(
    connection: Connection, database: str, way: str
) -> None:
    if way == "savepoint":
        run(connection, "SAVEPOINT s")
        with suppress(psycopg2.Error):
            run(connection, "SELECT 1 / 0")
        run(connection, "ROLLBACK TO SAVEPOINT s")
    elif way == "function":
        run(
            connection,
            "DO $$ BEGIN PERFORM 1 / 0; EXCEPTION WHEN division_by_zero THEN NULL; END $$",
        )
    else:
        assert rows(database, "SELECT pg_cancel_backend(%s)", backend_pid(connection)) == [(True,)]
    guarded_commit(connection, TOKEN)
    assert business_rows(database) == [(1,)]


LATE = """
CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {} RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON business DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION late()
"""
AT_COMMIT = {
    "an error": ("RAISE EXCEPTION 'too late';", TransactionAborted),
    "a cancellation": (
        "PERFORM pg_cancel_backend(pg_backend_pid()); PERFORM pg_sleep(10);",
        TransactionAborted,
    ),
    "a lock": ("PERFORM FROM other FOR UPDATE NOWAIT;", DatabaseConflict),
}


@pytest.mark.parametrize("what", AT_COMMIT)
def test_failures_in_commit_itself_are_errors(database: str, what: str) -> None:
    body, expected = AT_COMMIT[what]
    rows(
        database,
        "CREATE TABLE business (n int); CREATE TABLE other (n int); INSERT INTO other VALUES (1)",
    )
    rows(database, LATE.format(body))
    with closing(producer(database)) as holder, closing(producer(database)) as connection:
        run(holder, "SELECT FROM other FOR UPDATE")
        run(connection, "INSERT INTO business VALUES (1)")
        assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_INTRANS
        with pytest.raises(expected):
            guarded_commit(connection, TOKEN)
    assert business_rows(database) == []


def test_a_transaction_that_idled_too_long_is_in_doubt_and_never_taken_for_committed(
    connection: Connection, database: str
) -> None:
    run(connection, "SET LOCAL idle_in_transaction_session_timeout = 20")
    pid = backend_pid(connection)
    wait_until(
        lambda: not rows(database, "SELECT FROM pg_stat_activity WHERE pid = %s", pid),
        what="it is ended",
    )
    # for all that libpq knows
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_INTRANS
    with pytest.raises(InDoubt):
        guarded_commit(connection, TOKEN)
    assert business_rows(database) == []


def test_a_begin_that_psycopg2_does_not_know_of_is_committed_all_the_same(database: str) -> None:
    rows(database, "CREATE TABLE business (n int)")
    with closing(producer(database)) as connection:
        connection.autocommit = True
        run(connection, "BEGIN; INSERT INTO business VALUES (1)")
        connection.autocommit = False
        # its commit() would do nothing, and say nothing
        assert connection.status == extensions.STATUS_READY
        guarded_commit(connection, TOKEN)
        assert_ready(connection, database)
    assert business_rows(database) == [(1,)]


def test_a_constraint_that_fails_at_commit_is_an_abort_without_its_values(
    connection: Connection, database: str
) -> None:
    run(connection, "INSERT INTO business VALUES (1)")
    with pytest.raises(TransactionAborted, match=r"business_pkey") as raised:
        guarded_commit(connection, TOKEN)
    assert "Key (n)" not in str(raised.value)
    assert business_rows(database) == []
    assert_ready(connection, database)


def test_a_serialization_failure_at_commit_may_be_tried_again(database: str) -> None:
    rows(database, "CREATE TABLE business (n int)")
    with closing(producer(database)) as one, closing(producer(database)) as two:
        for connection in (one, two):
            connection.set_session(isolation_level="SERIALIZABLE")
            run(connection, "SELECT count(*) FROM business")
        for connection in (one, two):
            run(connection, "INSERT INTO business VALUES (1)")
        guarded_commit(one, TOKEN)
        with pytest.raises(DatabaseConflict) as raised:
            guarded_commit(two, TOKEN)
        assert (raised.value.retriable, raised.value.outcome) == (True, "not done")
        assert_ready(two, database)


def test_a_connection_that_breaks_at_commit_leaves_it_in_doubt(
    connection: Connection, database: str
) -> None:
    rows(database, "SELECT pg_terminate_backend(%s, 5000)", backend_pid(connection))
    with pytest.raises(InDoubt) as raised:
        guarded_commit(connection, TOKEN)
    assert (raised.value.token, raised.value.outcome) == (str(TOKEN), "unknown")


def test_a_connection_that_broke_before_is_an_abort(connection: Connection, database: str) -> None:
    rows(database, "SELECT pg_terminate_backend(%s, 5000)", backend_pid(connection))
    with suppress(psycopg2.Error):
        run(connection, "SELECT 1")
    with pytest.raises(TransactionAborted, match="lost before COMMIT"):
        guarded_commit(connection, TOKEN)


def test_a_transaction_that_was_ended_elsewhere_is_in_doubt(
    connection: Connection, database: str
) -> None:
    run(connection, "COMMIT")
    with pytest.raises(InDoubt):
        guarded_commit(connection, TOKEN)


def test_a_connection_in_the_middle_of_a_statement_is_refused(database: str) -> None:
    connection = psycopg2.connect(database, async_=True)
    while connection.poll() != extensions.POLL_OK:
        pass
    run(connection, "SELECT pg_sleep(0.1)")
    with pytest.raises(LocalProtocolError, match="busy"):
        guarded_commit(connection, TOKEN)
    connection.close()


def test_a_token_inside_a_savepoint_that_is_taken_back_is_gone(database: str) -> None:
    with closing(producer(database)) as connection:
        run(connection, "SAVEPOINT s")
        insert_token(connection, TOKEN, [LOG])
        run(connection, "ROLLBACK TO SAVEPOINT s")
        guarded_commit(connection, TOKEN)
    assert rows(database, "SELECT FROM txmq_token") == []
