"""Tables as frames: all rows of one moment, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from psycopg2.sql import SQL, Identifier

from txmq.errors import ConfigError, DatabaseError, SchemaMissing
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import claim, compact
from txmq.tx.postgres.inbox import Position
from txmq.tx.postgres.session import Connection, connect, transaction
from txmq_spark import database_snapshot
from txmq_spark.database_snapshot import (
    DatabaseSnapshot,
    copy_batches,
    open_snapshot,
    table_exists,
    table_frame,
)
from txmq_spark.database_tables import (
    GroupIdentity,
    GroupPartition,
    decided_tokens,
    inbox_ranges,
    oldest_token,
    read_tables,
)
from txmq_spark.mapping import Mapping

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # includes the start of a JVM on a loaded machine
LOG = "00000000-0000-4000-8000-000000000001"
GROUP = GroupIdentity("billing", LOG, (GroupPartition("orders", 7, 1, 0),))
HOSTILE = [
    "",
    None,
    "a,b",
    'say "hi"',
    "two\nlines",
    "\\N",
    "NULL",
    "'; DROP TABLE orders;--",
    "ключ💥",
    " ",
]


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    with closing(connect(database, application_name="tests")) as connection:
        yield connection


@pytest.fixture
def taken(database: str, connection: Connection) -> Iterator[DatabaseSnapshot]:
    """A snapshot after the orders were written and before `later` was."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (number int, name text)")
        cursor.execute("INSERT INTO orders SELECT n, 'o-' || n FROM generate_series(1, 3000) n")
    with open_snapshot(database) as taken:
        yield taken


COLUMNS = {"number": Identifier("number"), "name": Identifier("name")}
SCHEMA = "number bigint, name string"


def test_a_table_is_read_in_page_ranges_of_one_snapshot(
    spark: SparkSession,
    connection: Connection,
    taken: DatabaseSnapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_snapshot, "TASK_PAGES", 4)
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders SELECT n, 'later' FROM generate_series(3001, 9000) n")
        cursor.execute("DELETE FROM orders WHERE number < 100")
    frame = table_frame(spark, taken, "orders", COLUMNS, SCHEMA, None)
    assert frame.rdd.getNumPartitions() > 3
    rows = frame.collect()
    assert sorted(row.number for row in rows) == list(range(1, 3001))
    some = table_frame(spark, taken, "public.orders", COLUMNS, SCHEMA, SQL("number % 1000 = 0"))
    assert sorted(some.collect()) == [(1000, "o-1000"), (2000, "o-2000"), (3000, "o-3000")]


def test_texts_are_unchanged(connection: Connection, database: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE texts (number int, name text, flag bool)")
        for number, text in enumerate(HOSTILE):
            cursor.execute("INSERT INTO texts VALUES (%s, %s, %s)", (number, text, number % 2 == 0))
    with open_snapshot(database) as taken:
        query = "SELECT number, name, flag FROM texts ORDER BY number"
        [batch] = copy_batches(
            database, taken.exported, query, "number bigint, name string, flag boolean"
        )
        assert batch.column("name").to_pylist() == HOSTILE
        assert batch.column("flag").to_pylist() == [
            number % 2 == 0 for number in range(len(HOSTILE))
        ]
        assert (
            list(copy_batches(database, taken.exported, "SELECT 1 WHERE false", "n bigint")) == []
        )


def test_a_snapshot_that_has_ended_is_an_error(database: str) -> None:
    with open_snapshot(database) as taken:
        pass
    with pytest.raises(DatabaseError, match="in a task"):
        list(copy_batches(database, taken.exported, "SELECT 1", "n bigint"))


def test_a_missing_table_is_named(spark: SparkSession, taken: DatabaseSnapshot) -> None:
    assert (
        table_exists(taken, "orders"),
        table_exists(taken, "public.orders"),
        table_exists(taken, "order"),
    ) == (
        True,
        True,
        False,
    )
    with pytest.raises(SchemaMissing, match="no table order"):
        table_frame(spark, taken, "order", COLUMNS, SCHEMA, None)


def test_a_table_keeps_its_shape_while_it_is_read(
    spark: SparkSession, connection: Connection, taken: DatabaseSnapshot
) -> None:
    table_frame(spark, taken, "orders", COLUMNS, SCHEMA, None)
    with connection.cursor() as cursor, pytest.raises(Exception, match="lock timeout"):
        cursor.execute("SET lock_timeout = '20ms'; DROP TABLE orders")


def test_the_inbox_is_its_rows_and_its_ranges(
    spark: SparkSession, database: str, connection: Connection
) -> None:
    here = Position("billing", LOG, 7, 1)
    other = here._replace(group="refunds")
    for position, offsets in ((here, range(10)), (other, [77])):
        with transaction(connection) as cursor:
            claim(cursor.connection, {position: offsets})
    wait_until(
        lambda: compact(connection, "billing", LOG).moved or not recent(connection),
        what="no old snapshot holds rows",
    )
    with transaction(connection) as cursor:
        claim(cursor.connection, {here: [12, 20]})
    with open_snapshot(database) as taken:
        found = {tuple(row) for row in inbox_ranges(spark, taken, GROUP).collect()}
        place: dict[str, Any] = {"topic": "orders", "topic_id": 7, "partition": 1, "epoch": 5}
        place |= {"epochs": [[0, 0], [13, 5]]}
        parts = GROUP._replace(partitions=tuple(GroupPartition.of(place)))
        before = {tuple(row) for row in inbox_ranges(spark, taken, parts).collect()}
    assert before == {("orders", 1, 0, 10), ("orders", 1, 12, 13)}, "of epoch 5 there is nothing"
    assert found == {("orders", 1, 0, 10), ("orders", 1, 12, 13), ("orders", 1, 20, 21)}


def recent(connection: Connection) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM txmq_inbox_recent WHERE grp = 'billing'")
        [(count,)] = cursor.fetchall()
    return int(count)


def test_tokens_are_those_of_this_log(
    spark: SparkSession, database: str, connection: Connection
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT (extract(epoch FROM now()) * 1000)::int8")
        [(now,)] = cursor.fetchall()
        token = f"{now:012x}7{'1' * 19}"
        insert = "INSERT INTO txmq_token (tok, log_id, state) VALUES (%s, %s, %s)"
        cursor.execute(insert, (token, LOG, "D"))
        cursor.execute(insert, (token, LOG[:-1] + "2", "C"))
    with open_snapshot(database) as taken:
        [row] = decided_tokens(spark, taken, LOG).collect()
        oldest = oldest_token(taken)
    assert (row.token, row.state) == (token, "D")
    assert abs(row.at - now * 1_000) < 60_000_000
    assert oldest is not None
    assert oldest < token


@pytest.mark.parametrize(
    ("query", "field", "rows"),
    [
        ("SELECT 'a-1' AS message_id;", "applied_ids", [("a-1",)]),
        (
            "SELECT topic, partition, 7 AS offset FROM (VALUES ('orders', 3)) v(topic, partition)",
            "applied",
            [("orders", 3, 7, 8, "billing")],
        ),
        (
            "SELECT 'o-1' AS key, '12' AS version WHERE '{}' = '{}' AND 'a' LIKE '%a%'",
            "applied_versions",
            [("o-1", 12)],
        ),
    ],
)
def test_what_was_applied_may_come_from_a_query(
    spark: SparkSession,
    taken: DatabaseSnapshot,
    query: str,
    field: str,
    rows: list[tuple[object, ...]],
) -> None:
    found = read_tables(spark, taken, [GROUP], Mapping(applied=query))
    assert [tuple(row) for row in getattr(found, field).collect()] == rows


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELECT 1 AS number", "returns the columns number"),
        ("SELECT * FROM nowhere", "the query fails"),
        ("DELETE FROM orders RETURNING name AS message_id", "the query fails"),
        ("SELECT 'a' AS message_id; DROP TABLE orders", "the query fails"),
    ],
)
def test_a_query_with_other_columns_or_with_effects_is_refused(
    spark: SparkSession, taken: DatabaseSnapshot, query: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        read_tables(spark, taken, [GROUP], Mapping(applied=query))
