"""Tables as frames: all rows of one moment, unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import psycopg2
import pyarrow as pa
import pyarrow.csv
import pytest
from psycopg2.extensions import make_dsn, parse_dsn
from psycopg2.sql import SQL, Identifier

from tests.fixtures_postgres import wait_for_replay
from tests.tx.postgres.support import rows
from txmq.errors import ConfigError, DatabaseError, SchemaMissing
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.blocking import claim, compact
from txmq.tx.postgres.inbox import Position
from txmq.tx.postgres.session import Connection, Cursor, connect, transaction
from txmq_spark.database import snapshot as database_snapshot
from txmq_spark.database.mapping import BusinessTable, Mapping
from txmq_spark.database.snapshot import (
    DatabaseSnapshot,
    copy_batches,
    open_snapshot,
    require_table,
    table_exists,
    table_frame,
)
from txmq_spark.evidence.database_tables import (
    GroupIdentity,
    GroupPartition,
    decided_tokens,
    evidence_names,
    inbox_ranges,
    oldest_token,
    query_tables,
    read_tables,
)
from txmq_spark.session.query_errors import JobFailed, job_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    with open_snapshot(database, ["orders", "public.nowhere"]) as taken:
        yield taken


COLUMNS = {"number": Identifier("number"), "name": Identifier("name")}
SCHEMA = "number bigint, name string"


def test_rows_may_be_wider_than_the_blocks_in_which_they_are_parsed(
    connection: Connection, taken: DatabaseSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_snapshot, "BLOCK", 1_024)
    wide = "repeat('a' || chr(10), (n % 400 = 7)::int * n * 40)"
    for first in range(1, 41):  # the rows before a wide one decide how blocks are cut
        query = f"SELECT n, {wide} FROM generate_series({first}, 1000) n"
        batches = copy_batches(taken.dsn, taken.exported, query, "number bigint, name string")
        table = pa.Table.from_batches(batches)
        assert table.column("number").to_pylist() == list(range(first, 1_001))
        found = [name for name in table.column("name").to_pylist() if name]
        assert found == ["a\n" * (40 * n) for n in range(7, 1_001, 400) if n >= first]


def test_a_reader_that_has_failed_and_reads_on_takes_no_rows_from_the_next_one(
    taken: DatabaseSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    class Failing:
        """A reader whose rows do not fit in a block."""

        def __iter__(self) -> Iterator[pa.RecordBatch]:
            raise pa.ArrowInvalid("straddling object: try to increase block size")

    def opened(source: Any, **options: Any) -> object:
        given.append(source)
        if len(given) == 1:
            return Failing()
        given[0].read(1 << 16)  # as its thread does, at any time
        return open_csv(source, **options)

    open_csv = pyarrow.csv.open_csv
    monkeypatch.setattr(pyarrow.csv, "open_csv", opened)
    query = "SELECT n FROM generate_series(1, 50000) n"
    batches = copy_batches(taken.dsn, taken.exported, query, "number bigint")
    numbers = pa.Table.from_batches(batches).column("number").to_pylist()
    assert numbers == list(range(1, 50_001))
    assert len(given) == 2


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


def test_rows_that_a_policy_hides_are_an_error(connection: Connection, database: str) -> None:
    """They would seem to be missing."""
    reader = f"reader_{parse_dsn(database)['dbname']}"
    with connection.cursor() as cursor:
        cursor.execute(
            f"CREATE TABLE orders (number int); CREATE ROLE {reader};"
            f" GRANT SELECT ON orders TO {reader};"
            " ALTER TABLE orders ENABLE ROW LEVEL SECURITY;"
            " CREATE POLICY few ON orders USING (number < 10)"
        )
    dsn = make_dsn(database, options=f"-c role={reader}")
    with open_snapshot(dsn) as hidden:
        with pytest.raises(ConfigError, match="policies hide rows of it from this role"):
            require_table(hidden, "orders")
        with pytest.raises(DatabaseError, match="42501"):  # in a query
            list(copy_batches(dsn, hidden.exported, "SELECT number FROM orders", "number bigint"))
    with connection.cursor() as cursor:
        cursor.execute(f"DROP OWNED BY {reader}; DROP ROLE {reader}")


def test_a_partition_that_is_a_foreign_table_is_read(
    connection: Connection, taken: DatabaseSnapshot, database: str, tmp_path: Path
) -> None:
    """It has no pages; a file has rows without places, too."""
    (tmp_path / "old.csv").write_text("1\n2\n")
    tmp_path.chmod(0o755)
    del taken
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE EXTENSION file_fdw; CREATE SERVER files FOREIGN DATA WRAPPER file_fdw;"
            " CREATE TABLE parts (number int) PARTITION BY RANGE (number);"
            " CREATE TABLE new PARTITION OF parts FOR VALUES FROM (10) TO (20);"
            " CREATE FOREIGN TABLE old PARTITION OF parts FOR VALUES FROM (0) TO (10)"
            f" SERVER files OPTIONS (filename '{tmp_path}/old.csv', format 'csv');"
            " INSERT INTO parts VALUES (10)"
        )
    with open_snapshot(database) as later:
        ranges = list(database_snapshot._page_ranges(later, "parts"))
        conditions = [piece.as_string(later.connection) for _leaf, piece in ranges]
    assert conditions == ["ctid >= '(0,0)'::tid", "true"]


@pytest.mark.parametrize(
    "name", ["", ".", "public.", "a.b.c", "orders%s", "orders\0", 'orders"; DROP TABLE orders; --']
)
def test_a_name_is_a_name_and_nothing_else(
    connection: Connection, taken: DatabaseSnapshot, name: str
) -> None:
    mapping = Mapping.model_construct(tables=(BusinessTable.model_construct(name=name),))
    with pytest.raises((ConfigError, SchemaMissing)):
        mapping.check(taken)
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM orders LIMIT 1")


def test_a_column_of_tokens_has_them(taken: DatabaseSnapshot) -> None:
    lying = BusinessTable(name="orders", key="name", token="number")
    with pytest.raises(ConfigError, match="column number is of type integer, and a token is"):
        Mapping(tables=(lying,)).check(taken)


def test_postgresql_that_dies_inside_a_copy_fails_the_job_and_not_its_rows(
    spark: SparkSession, crashable_postgres: OwnServer, crashable_database: str
) -> None:
    with closing(connect(crashable_database, application_name="tests")) as connection:
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE orders (number int)")
            cursor.execute("INSERT INTO orders SELECT generate_series(1, 5000)")
            # A COPY of it stops behind many rows, as long as somebody has the lock.
            cursor.execute(
                "CREATE VIEW slow AS SELECT number FROM orders"
                " WHERE number < 4000 OR pg_advisory_xact_lock(18) IS NOT NULL"
            )
            cursor.execute("SELECT pg_advisory_lock(18)")
        copying = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ '^COPY'"
        columns = {"number": Identifier("number")}
        with ThreadPoolExecutor(1) as pool, open_snapshot(crashable_database) as taken:
            slow = table_frame(spark, taken, "slow", columns, "number bigint", None)

            def read() -> None:
                with job_errors():
                    slow.collect()

            reading = pool.submit(read)
            wait_until(lambda: len(rows(crashable_database, copying)) == 1, what="COPY has begun")
            crashable_postgres.restart("immediate")
            with pytest.raises(JobFailed, match="reading the database in a task"):
                reading.result(PATIENCE_S)
    with open_snapshot(crashable_database) as taken:
        again = table_frame(spark, taken, "slow", columns, "number bigint", None)
        assert again.count() == 5_000


def test_a_standby_is_refused_unless_it_is_allowed(
    crashable_postgres: OwnServer, standby: OwnServer, crashable_database: str
) -> None:
    with (
        closing(connect(crashable_database, application_name="tests")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("CREATE TABLE orders AS SELECT 7 AS number")
    wait_for_replay(crashable_postgres, standby)
    dsn = standby.dsn(parse_dsn(crashable_database)["dbname"])
    with pytest.raises(ConfigError, match=r"is on a standby.*--standby"), open_snapshot(dsn):
        pytest.fail("it was read")
    with open_snapshot(dsn, standby=True) as taken:
        [batch] = copy_batches(
            taken.dsn, taken.exported, "SELECT number FROM orders", "number bigint"
        )
    assert batch.column("number").to_pylist() == [7]


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


CHANGES = [
    "TRUNCATE rows",
    "ALTER TABLE rows ALTER number TYPE int8",
    "DROP TABLE rows",
    "ALTER TABLE parts DETACH PARTITION low",
    "DROP TABLE low",
]


@pytest.mark.parametrize(("version", "lifted"), [(160_009, False), (170_000, True)])
def test_a_limit_for_transactions_does_not_end_a_snapshot(version: int, *, lifted: bool) -> None:
    """Servers have that limit since version 17, and older ones refuse its name."""
    cursor = Mock(connection=Mock(server_version=version))
    database_snapshot._begin(cursor)
    statements = [call.args[0] for call in cursor.execute.call_args_list]
    assert any("LOCAL transaction_timeout = 0" in one for one in statements) == lifted


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_is_changed_before_its_snapshot_or_behind_it(
    connection: Connection, database: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a snapshot from before the change PostgreSQL would show no rows."""
    begin, refused = database_snapshot._begin_locked, list[str]()
    cursor = connection.cursor()
    cursor.execute(
        "CREATE TABLE rows AS SELECT generate_series(1, 9) AS number;"
        " CREATE VIEW seen AS SELECT number FROM rows;"
        " CREATE TABLE parts (number int) PARTITION BY RANGE (number);"
        " CREATE TABLE low PARTITION OF parts FOR VALUES FROM (1) TO (5);"
        " CREATE TABLE high PARTITION OF parts FOR VALUES FROM (5) TO (10);"
        " INSERT INTO parts TABLE rows; SET lock_timeout = '20ms'"
    )

    def meanwhile(own: Cursor, tables: Iterable[str | Identifier]) -> None:
        begin(own, tables)
        try:
            cursor.execute(change)
        except psycopg2.errors.LockNotAvailable:
            refused.append(change)

    monkeypatch.setattr(database_snapshot, "_begin_locked", meanwhile)
    with open_snapshot(database, ["seen", "parts"]) as taken:
        ranges = database_snapshot._page_ranges(taken, "parts")
        texts = [
            SQL("SELECT number FROM seen"),
            *(SQL("SELECT number FROM {} WHERE {}").format(*one) for one in ranges),
        ]
        found = [
            number
            for text in texts
            for batch in copy_batches(
                taken.dsn, taken.exported, text.as_string(connection), "number bigint"
            )
            for number in batch.column("number").to_pylist()
        ]
    assert sorted(found) == sorted([*range(1, 10)] * 2)
    assert refused == [change]


def test_the_tables_of_a_query_are_locked_as_far_as_the_role_may(
    connection: Connection, database: str
) -> None:
    """Also those below a view whose tables the role may not read."""
    cursor, reader = connection.cursor(), f"asking_{parse_dsn(database)['dbname']}"
    cursor.execute(
        'CREATE TABLE "o.d d%" AS SELECT 1 AS number; CREATE TABLE hidden AS SELECT 2 AS number;'
        " CREATE TABLE other AS SELECT 3 AS number;"
        " CREATE VIEW seen AS SELECT number FROM hidden;"
        f' CREATE ROLE {reader}; GRANT SELECT ON "o.d d%", seen TO {reader}'
    )
    query = "SELECT 'a' AS message_id FROM seen, \"o.d d%\" WHERE false; -- all"
    dsn = make_dsn(database, options=f"-c role={reader}")
    try:
        with open_snapshot(dsn) as before:
            names = query_tables(before, query)
        with open_snapshot(dsn, names):
            for table, is_locked in {'"o.d d%"': True, "hidden": True, "other": False}.items():
                cursor.execute("SET lock_timeout = '20ms'")
                refused = pytest.raises(psycopg2.errors.LockNotAvailable)
                with refused if is_locked else nullcontext():
                    cursor.execute(f"TRUNCATE {table}")
    finally:
        cursor.execute(f"DROP OWNED BY {reader}; DROP ROLE {reader}")


def test_a_role_needs_the_right_to_read_a_table_and_no_other(
    connection: Connection, database: str
) -> None:
    """No right for each partition, none to write, and time for a snapshot."""
    cursor, reader = connection.cursor(), f"reader_{parse_dsn(database)['dbname']}"
    cursor.execute(
        "CREATE TABLE parts (number int) PARTITION BY RANGE (number);"
        " CREATE TABLE low PARTITION OF parts FOR VALUES FROM (1) TO (5);"
        " INSERT INTO parts SELECT generate_series(1, 4);"
        f" CREATE ROLE {reader}; GRANT SELECT ON parts TO {reader}"
    )
    settings = {
        "role": reader,
        "default_transaction_read_only": "on",
        "idle_in_transaction_session_timeout": "1ms",
    }
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    try:
        with open_snapshot(make_dsn(database, options=options), ["parts"]) as taken:
            [(table, _all)] = database_snapshot._page_ranges(taken, "parts")
            query = SQL("SELECT number FROM {}").format(table).as_string(connection)
            [batch] = copy_batches(taken.dsn, taken.exported, query, "number bigint")
            shown = database_snapshot.fetch(
                taken, "SELECT current_setting('idle_in_transaction_session_timeout')", {}
            )
        with (
            pytest.raises(DatabaseError, match=r"locking the table low against changes: .* 42501"),
            open_snapshot(make_dsn(database, options=options), ["low"]),
        ):
            pytest.fail("it was read")
    finally:
        cursor.execute(f"DROP OWNED BY {reader}; DROP ROLE {reader}")
    assert batch.column("number").to_pylist() == [1, 2, 3, 4]
    assert shown == [("0",)]


def test_a_database_need_not_have_tables_of_txmq(connection: Connection, database: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE txmq_token CASCADE")
    with open_snapshot(database, evidence_names(Mapping())) as taken:
        assert oldest_token(taken) is None


def test_columns_of_domains_have_the_types_below(connection: Connection, database: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE DOMAIN whole AS int8; CREATE DOMAIN version AS whole CHECK (value > 0);"
            ' CREATE DOMAIN writer AS uuid; CREATE TABLE "Odd %" ("Id" text, v version, t writer);'
            ' CREATE MATERIALIZED VIEW kept AS TABLE "Odd %"'
        )
        cursor.execute('ALTER TABLE "Odd %" RENAME TO "Odd \'s"')
    tables = [
        BusinessTable(name=name, key="Id", version="v", token="t") for name in ("Odd 's", "kept")
    ]
    with open_snapshot(database, [table.name for table in tables]) as taken:
        for table in tables:
            Mapping(tables=(table,)).check(taken)
            assert database_snapshot.table_columns(taken, table.name) == {
                "Id": "text",
                "v": "bigint",
                "t": "uuid",
            }


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
        cursor.execute("SELECT at FROM txmq_token WHERE log_id = %s", (LOG,))
        [(at,)] = cursor.fetchall()
    with open_snapshot(database) as taken:
        [row] = decided_tokens(spark, taken, LOG).collect()
        oldest = oldest_token(taken)
    assert (row.token, row.state) == (token, "D")
    assert row.at == round(at.timestamp() * 1e6)
    assert oldest is not None
    assert oldest < token


@pytest.mark.parametrize(
    ("query", "field", "rows"),
    [
        ("SELECT 'a-1' AS message_id;", "applied_ids", [("a-1",)]),
        ("SELECT 'a-1' AS message_id -- of the ledger", "applied_ids", [("a-1",)]),
        ("SELECT 'a-1' AS message_id;\n-- of the ledger; 2024\n", "applied_ids", [("a-1",)]),
        ("SELECT '; -- b' AS message_id", "applied_ids", [("; -- b",)]),
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
        ("SELECT 'a' AS key, 1 AS version, 2 AS version", "the columns key, version, version"),
        ("SELECT 'a' AS key, 'NaN'::numeric AS version", "version is of type numeric"),
        ("SELECT * FROM nowhere", "the query fails"),
        ("DELETE FROM orders RETURNING name AS message_id", "the query fails"),
        ("SELECT 'a' AS message_id; DROP TABLE orders", "the query fails"),
        (
            "SELECT 'a' AS message_id) a; COMMIT; DROP TABLE orders; SELECT * FROM (SELECT 1",
            "the query fails",
        ),
        ("SELECT '\0' AS message_id", "the query fails"),
        ("SELECT 'a' AS message_id; DROP TABLE orders; -- all", "the query fails"),
    ],
)
def test_a_query_with_other_columns_or_with_effects_is_refused(
    spark: SparkSession, connection: Connection, taken: DatabaseSnapshot, query: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        read_tables(spark, taken, [GROUP], Mapping(applied=query))
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM orders LIMIT 1")
