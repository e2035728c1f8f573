"""The token row: written with the business rows, and refused if it would prove
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.tx.postgres.support import (
    LOG,
    OTHER_LOG,
    check_of,
    new_token,
    poor_role,
    producer,
    rows,
    xid_of,
)
from txmq.errors import (
    DatabaseError,
    LocalProtocolError,
    SchemaMissing,
    SynchronousCommitOff,
    TokenFenced,
    TransactionAborted,
)
from txmq.model.message import Decision
from txmq.tx.postgres.blocking import insert_token
from txmq.tx.postgres.resolver import TokenResolver
from txmq.tx.postgres.session import Connection


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    with closing(producer(database)) as connection:
        yield connection


def written(dsn: str) -> list[tuple[object, ...]]:
    return rows(
        dsn,
        "SELECT tok::text, log_id::text, xid::text::int8, state"
        " FROM public.txmq_token ORDER BY log_id",
    )


def test_one_row_for_each_broker_appears_with_the_commit(
    database: str, connection: Connection
) -> None:
    token = new_token()
    insert_token(connection, token, [OTHER_LOG, LOG])
    xid = xid_of(connection)
    assert written(database) == []
    connection.commit()
    assert written(database) == [(str(token), str(log), xid, "C") for log in (LOG, OTHER_LOG)]


def test_the_token_can_be_the_first_statement_of_the_transaction(
    database: str, connection: Connection
) -> None:
    insert_token(connection, new_token(), [LOG])
    connection.rollback()
    assert written(database) == []


@pytest.mark.parametrize("before", ["on", "remote_apply", "remote_write"])
def test_the_commit_is_at_least_synchronous_and_only_for_this_transaction(
    connection: Connection, before: str
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET synchronous_commit = {before}")
        connection.commit()
        insert_token(connection, new_token(), [LOG])
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchall() == [("on" if before == "remote_write" else before,)]
        connection.commit()
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchall() == [(before,)]


@pytest.mark.parametrize("weak", ["off", "local"])
def test_a_commit_that_does_not_wait_for_the_disk_is_refused_unless_allowed(
    connection: Connection, weak: str
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET synchronous_commit = {weak}")
        connection.commit()
    with pytest.raises(SynchronousCommitOff, match=weak) as raised:
        insert_token(connection, new_token(), [LOG])
    assert raised.value.outcome == "not done"
    connection.rollback()
    insert_token(connection, new_token(), [LOG], allow_weak_commit=True)
    with connection.cursor() as cursor:
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchall() == [(weak,)]


def test_an_earlier_fence_ends_the_transaction(database: str, connection: Connection) -> None:
    token = new_token()
    resolver = TokenResolver(database)
    [answer] = resolver.resolve([check_of(database, token)])
    resolver.close()
    assert answer.verdict is Decision.ROLLBACK
    with pytest.raises(TokenFenced) as raised:
        insert_token(connection, token, [LOG])
    assert (raised.value.outcome, raised.value.retriable) == ("not done", False)


def test_a_failed_transaction_is_refused_before_anything_is_sent(connection: Connection) -> None:
    with connection.cursor() as cursor, pytest.raises(Exception, match="nowhere"):
        cursor.execute("SELECT * FROM nowhere")
    with pytest.raises(TransactionAborted):
        insert_token(connection, new_token(), [LOG])


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_row_without_its_transaction_is_refused(
    database: str,
    connection: Connection,
    autocommit: bool,  # noqa: FBT001
) -> None:
    connection.autocommit = autocommit
    if not autocommit:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            # by hand: psycopg2 would run the next statement without a BEGIN
            cursor.execute("COMMIT")
    with pytest.raises(LocalProtocolError, match="no transaction is open"):
        insert_token(connection, new_token(), [LOG])
    assert written(database) == []


def test_an_explicit_transaction_in_autocommit_mode_is_accepted(
    database: str, connection: Connection
) -> None:
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        insert_token(connection, new_token(), [LOG])
        assert written(database) == []
        cursor.execute("COMMIT")
    assert len(written(database)) == 1


def test_missing_tables_and_rights_are_reported_with_the_remedy(
    database: str, empty_database: str
) -> None:
    with (
        closing(producer(empty_database)) as nothing,
        pytest.raises(SchemaMissing, match="txmq schema install"),
    ):
        insert_token(nothing, new_token(), [LOG])
    with (
        poor_role(database) as (_, dsn),
        closing(producer(dsn)) as poor,
        pytest.raises(DatabaseError, match="GRANT"),
    ):
        insert_token(poor, new_token(), [LOG])


def test_another_table_of_that_name_on_the_search_path_is_not_used(
    database: str, connection: Connection
) -> None:
    rows(
        database,
        "CREATE SCHEMA other; CREATE TABLE other.txmq_token (LIKE public.txmq_token INCLUDING ALL)",
    )
    with connection.cursor() as cursor:
        cursor.execute("SET search_path = other, public")
    insert_token(connection, new_token(), [LOG])
    connection.commit()
    assert len(written(database)) == 1
