"""Inboxes of older tables, by names: kept, and taken over by those they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib import resources

import pytest

from tests.tx.postgres.support import LOG, new_token, poor_role, rows
from txmq.errors import SchemaMissing
from txmq.tx.postgres.blocking import adopt, applied, claim, discard, stored_by_name
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.inbox import Position
from txmq.tx.postgres.inbox_names import Adoption, Evidence
from txmq.tx.postgres.schema import check, install
from txmq.tx.postgres.session import Connection, connect, transaction

ON = str(LOG)
HERE = Position("g", ON, 7, 0, 2)
OTHER_LOG = str(new_token())
OLD_ROWS = f"""
INSERT INTO txmq_inbox VALUES ('g', 't', 0, 2, '{{[0,5)}}'), ('g@m#{ON}', 't', 0, 1, '{{[0,3)}}');
INSERT INTO txmq_inbox_recent VALUES ('g', 't', 0, 2, 6), ('g', 't', 0, 1, 9), ('g', 'u', 0, 1, 0);
"""  # constants


def schema_3(dsn: str) -> None:
    for version in (1, 2, 3):
        made = resources.files("txmq.tx.postgres").joinpath(f"schema_{version}.sql")
        rows(dsn, made.read_text("utf-8").replace("%", "%%"))
    rows(dsn, "INSERT INTO txmq_schema (version) VALUES (3)")


@pytest.fixture
def connection(empty_database: str) -> Iterator[Connection]:
    """A database whose inbox was filled by names, and then brought up to date."""
    schema_3(empty_database)
    rows(empty_database, OLD_ROWS)
    with closing(connect(empty_database, application_name="test")) as connection:
        install(connection)
        yield connection


def adopted(
    connection: Connection,
    position: Position = HERE,
    *,
    made_at: int | None = None,
    floor: int = 1,
    cursor: int = 7,
) -> Adoption:
    return adopt(connection, position, "t", Evidence(made_at, floor, cursor))


def test_what_was_stored_by_name_is_taken_over_once(
    connection: Connection,
) -> None:
    assert adopted(connection) is Adoption.ADOPTED
    assert applied(connection, HERE).ranges == ((0, 5), (6, 7))
    assert applied(connection, HERE._replace(epoch=1)).ranges == ()
    assert [one[:5] for one in stored_by_name(connection)] == [
        ("g", None, "t", 0, 1),
        ("g", None, "u", 0, 1),
        ("g@m", ON, "t", 0, 1),
    ]
    assert adopted(connection) is Adoption.NONE
    assert adopted(connection, HERE._replace(log_id=OTHER_LOG)) is Adoption.NONE
    with transaction(connection) as cursor:
        assert claim(cursor.connection, {HERE: [4, 5, 6]}) == {(HERE, 5)}


def test_a_topic_that_was_made_later_takes_nothing(connection: Connection) -> None:
    assert adopted(connection, made_at=4_000_000_000_000_000) is Adoption.NONE
    assert len(stored_by_name(connection)) == 4


@pytest.mark.parametrize(("floor", "cursor"), [(0, 7), (1, 6)])
def test_what_the_group_has_not_seen_is_unclear_until_an_operator_decides(
    connection: Connection, floor: int, cursor: int
) -> None:
    assert adopted(connection, floor=floor, cursor=cursor) is Adoption.UNCLEAR
    assert applied(connection, HERE).ranges == ()
    assert adopt(connection, HERE, "t") is Adoption.ADOPTED
    assert applied(connection, HERE).ranges == ((0, 5), (6, 7))
    assert discard(connection, "g", "u") == 1
    assert [one.group for one in stored_by_name(connection)] == ["g", "g@m"]


def test_a_group_that_was_named_with_its_log_is_of_that_log(connection: Connection) -> None:
    position = Position("g@m", OTHER_LOG, 7, 0, 1)
    assert adopted(connection, position) is Adoption.NONE
    assert adopted(connection, position._replace(log_id=ON)) is Adoption.ADOPTED
    assert applied(connection, position._replace(log_id=ON)).ranges == ((0, 3),)


def test_an_older_txmq_fails_at_the_new_tables(connection: Connection) -> None:
    with (
        pytest.raises(SchemaMissing),
        translated("claiming messages"),
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT public.txmq_claim('g', 't', 0, 2, 1, '{1}')")


def test_who_may_write_the_inbox_may_take_over_what_it_had(empty_database: str) -> None:
    schema_3(empty_database)
    rows(empty_database, OLD_ROWS)
    with poor_role(empty_database) as (role, dsn):
        tables = "txmq_schema, txmq_token, txmq_token_default, txmq_broker, txmq_outbox"
        rows(empty_database, f"GRANT ALL ON {tables}, txmq_inbox_recent, txmq_inbox TO {role}")
        with closing(connect(empty_database, application_name="test")) as owner:
            install(owner)
        with closing(connect(dsn, application_name="poor")) as connection:
            assert not [remark for remark in check(connection) if "inbox" in remark]
            assert adopted(connection) is Adoption.ADOPTED
