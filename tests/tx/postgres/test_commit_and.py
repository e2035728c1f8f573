"""A COMMIT in one round trip with the first statement of the next transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress

import psycopg2
import pytest
from psycopg2 import extensions

from tests.tx.postgres.business_table import assert_ready, business_rows, run
from tests.tx.postgres.support import LOG, backend_pid, new_token, rows
from txmq.errors import InDoubt, TransactionAborted
from txmq.tx.postgres import inbox
from txmq.tx.postgres.blocking import claim, commit_and, roll_back
from txmq.tx.postgres.drivers import driver_of
from txmq.tx.postgres.inbox import Claims, Position
from txmq.tx.postgres.session import Connection, connect

TOKEN, HERE = new_token(), Position("billing", str(LOG), 7, 3)


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    """A connection with one uncommitted row."""
    rows(database, "CREATE TABLE business (n int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)")
    with closing(connect(database, application_name="test")) as connection:
        run(connection, "BEGIN; INSERT INTO business VALUES (1)")
        yield connection


def commit_and_claim(connection: Connection) -> Claims:
    driver = driver_of(connection)
    wanted = {HERE: [5, 6]}
    return commit_and(driver, TOKEN, lambda first: inbox.claim(driver, wanted, first=first))


def test_the_first_transaction_is_committed_and_the_next_has_its_claims(
    connection: Connection, database: str
) -> None:
    assert commit_and_claim(connection) == {(HERE, 5), (HERE, 6)}
    assert business_rows(database) == [(1,)]
    assert rows(database, "SELECT count(*) FROM txmq_inbox_recent") == [(0,)]
    roll_back(connection)
    assert_ready(connection, database)


def test_a_swallowed_error_is_an_abort_and_nothing_is_begun(
    connection: Connection, database: str
) -> None:
    with suppress(psycopg2.Error):
        run(connection, "SELECT 1 / 0")
    with pytest.raises(TransactionAborted):
        commit_and_claim(connection)
    assert_ready(connection, database)
    assert business_rows(database) == []


@pytest.mark.parametrize(
    ("trouble", "left"), [("INSERT INTO business VALUES (1)", []), ("SELECT", [(1,)])]
)
def test_a_failure_on_either_side_of_commit_leaves_the_transaction_in_doubt(
    connection: Connection, database: str, trouble: str, left: list[tuple[int]]
) -> None:
    """A constraint fails in COMMIT, or a claim after it, because its function is
    missing.
    """
    run(connection, trouble)
    if left:
        rows(database, "DROP FUNCTION txmq_claim")
    with pytest.raises(InDoubt) as raised:
        commit_and_claim(connection)
    assert "Key (n)" not in str(raised.value)
    roll_back(connection)
    assert_ready(connection, database)
    assert business_rows(database) == left


def test_a_lost_connection_leaves_the_transaction_in_doubt(
    connection: Connection, database: str
) -> None:
    rows(database, "SELECT pg_terminate_backend(%s, 5000)", backend_pid(connection))
    with pytest.raises(InDoubt) as raised:
        commit_and_claim(connection)
    assert raised.value.token == str(TOKEN)


def test_messages_of_several_positions_are_claimed_at_once(connection: Connection) -> None:
    other = HERE._replace(partition=4, epoch=1)
    with connection.cursor() as cursor:
        assert claim(cursor.connection, {other: [7]}) == {(other, 7)}
        wanted = {other: [8, 7], HERE: [1]}
        assert claim(cursor.connection, wanted) == {(other, 8), (HERE, 1)}
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_INTRANS
