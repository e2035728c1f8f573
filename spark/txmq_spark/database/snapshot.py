"""Tables of a business database as DataFrames, all of the same moment.

The driver opens a read-only transaction and exports its snapshot. The tasks read page
ranges of the tables under that snapshot by COPY, and Arrow parses the output. Nothing
is written, and no JDBC driver is needed.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import IO, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.csv
from psycopg2.extensions import make_dsn
from psycopg2.sql import SQL, Composable, Identifier, Literal
from pyspark.sql import DataFrame, SparkSession

from txmq.errors import ConfigError, DatabaseUnavailable, SchemaMissing
from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.session import Connection, Cursor, connect, parsed_dsn
from txmq_spark.database.sql_tables import table_name
from txmq_spark.session.task_frames import task_frame

TASK_PAGES: Final = 8_192  # pages that one task reads: 64 MiB
FILE_BUFFER: Final = 1 << 20  # bytes; a result goes to a file, so that a task of any size fits
BLOCK: Final = 1 << 20  # bytes of a result that are parsed together
LARGEST_BLOCK: Final = 2**31 - 1  # of pyarrow
APPLICATION_NAME: Final = "txmq reconcile"

_BEGIN: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL client_encoding = 'UTF8';"
    # A policy would leave rows out, which would then seem to be missing: an error.
    " SET LOCAL row_security = off;"
    # The driver's transaction is idle while tasks read.
    " SET LOCAL idle_in_transaction_session_timeout = 0"
)
# A snapshot lasts as long as the transaction that exported it. PostgreSQL 17 can have a
# limit for that.
_NO_LIMIT: Final = "SET LOCAL transaction_timeout = 0"
_LIMITED_SINCE: Final = 170_000  # server version
# What LOCK TABLE takes. With a view it locks the tables of the view.
_LOCKABLE: Final = """
SELECT FROM pg_class WHERE oid = to_regclass(%(table)s) AND relkind IN ('r', 'p', 'v')
"""
_LOCK: Final = SQL("LOCK TABLE {} IN ACCESS SHARE MODE")
_FACTS: Final = """
SELECT pg_export_snapshot(), pg_current_snapshot()::text,
       (extract(epoch FROM clock_timestamp()) * 1000000)::int8, current_database(),
       pg_is_in_recovery()
"""
# Of a domain the type below it.
_COLUMNS: Final = """
WITH RECURSIVE typed AS (
    SELECT attnum, attname, atttypid AS type FROM pg_attribute
    WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT attnum, attname, typbasetype FROM typed JOIN pg_type ON oid = type WHERE typtype = 'd'
)
SELECT attname, type::regtype::text FROM typed JOIN pg_type ON oid = type
WHERE typtype <> 'd' ORDER BY attnum
"""
# Tables that hold rows: the table itself, or its partitions at any depth; and whether
# the role may read all rows of each by itself.
_LEAVES: Final = """
WITH leaves AS (SELECT relid FROM pg_partition_tree(to_regclass(%(table)s)) WHERE isleaf)
SELECT relid::text, greatest(pg_relation_size(relid) / current_setting('block_size')::int8, 1),
       relkind, has_table_privilege(relid, 'SELECT') AND NOT row_security_active(relid)
FROM (TABLE leaves UNION ALL SELECT to_regclass(%(table)s) WHERE NOT EXISTS (TABLE leaves)) held
JOIN pg_class ON oid = relid
ORDER BY 1
"""
_KIND: Final = """
SELECT relkind, row_security_active(oid) FROM pg_class WHERE oid = to_regclass(%(table)s)
"""
# Views and foreign tables have no pages. A materialized view, which nobody can lock,
# could get other pages between two tasks.
TABLES_WITH_PAGES: Final = ("r", "p")


class DatabaseSnapshot(NamedTuple):
    """An exported snapshot, valid while `connection` keeps its transaction open."""

    connection: Connection
    dsn: str
    exported: str
    visible: str  # as pg_current_snapshot() prints it
    at: int  # microseconds by the server's clock
    database: str
    identity: ServerIdentity


@contextmanager
def open_snapshot(
    dsn: str, tables: Iterable[str | Identifier] = (), *, standby: bool = False
) -> Iterator[DatabaseSnapshot]:
    """Take a snapshot of the database, which lasts for the block.

    `tables` are those that will be read: nobody can change their definitions meanwhile.
    `standby` allows a snapshot of a standby server. Raises ConfigError, DatabaseError.
    """
    # A list of hosts has the primary, which is chosen unless standbys are fine. A role
    # that cannot write may read there.
    server = "any" if standby else parsed_dsn(dsn).get("target_session_attrs", "primary")
    anything, dsn = (make_dsn(dsn, target_session_attrs=which) for which in ("any", server))
    try:
        opened = connect(dsn, application_name=APPLICATION_NAME)
    except DatabaseUnavailable:
        if standby:
            raise
        opened = connect(anything, application_name=APPLICATION_NAME)
    with closing(opened) as connection:
        identity = read_server(connection).identity
        with translated("taking a snapshot"), connection.cursor() as cursor:
            _begin_locked(cursor, tables)
            cursor.execute(_FACTS)
            [(exported, sees, at, database, replica)] = cursor.fetchall()
        if replica and not standby:
            raise ConfigError(
                "dsn",
                f"database {database} is on a standby: it shows commits later than the primary,"
                " and in another order, so a committed row may seem to be missing",
                hint="name the primary, or allow it: --standby",
            )
        yield DatabaseSnapshot(connection, dsn, exported, sees, at, database, identity)


def _begin(cursor: Cursor) -> None:
    cursor.execute(_BEGIN)
    if cursor.connection.server_version >= _LIMITED_SINCE:
        cursor.execute(_NO_LIMIT)


def _begin_locked(cursor: Cursor, tables: Iterable[str | Identifier]) -> None:
    """Begin a transaction, and lock the tables that exist against changes.

    The locks come before the snapshot. Under an older one PostgreSQL shows a table that
    was truncated, rewritten or dropped meanwhile without its rows, and a detached
    partition not at all.
    """
    locked = list[Identifier]()
    for name in tables:
        table = table_name(name) if isinstance(name, str) else name
        cursor.execute(_LOCKABLE, {"table": table.as_string(cursor)})
        locked += [table] * cursor.rowcount
    _begin(cursor)
    for table in locked:
        with translated(f"locking the table {'.'.join(table.strings)} against changes"):
            cursor.execute(_LOCK.format(table))


def table_exists(snapshot: DatabaseSnapshot, table: str) -> bool:
    """Return whether the database has this table."""
    return bool(fetch(snapshot, _KIND, {"table": _quoted(snapshot, table)}))


def table_columns(snapshot: DatabaseSnapshot, table: str) -> dict[str, str]:
    """Return the types of a table's columns by name.

    Raises SchemaMissing where the database has no such table.
    """
    require_table(snapshot, table)
    return dict(fetch(snapshot, _COLUMNS, {"table": _quoted(snapshot, table)}))


def require_table(snapshot: DatabaseSnapshot, table: str) -> str:
    """Return the kind of a table. Raises SchemaMissing, ConfigError."""
    for kind, hides_rows in fetch(snapshot, _KIND, {"table": _quoted(snapshot, table)}):
        if hides_rows:
            raise ConfigError(
                f"table {table}",
                "policies hide rows of it from this role, which would then seem to be missing",
                hint="use its owner, or a role with BYPASSRLS",
            )
        return str(kind)
    raise SchemaMissing(
        f"the database has no table {table}", hint="include the schema, as in public.orders"
    )


def fetch(
    snapshot: DatabaseSnapshot, query: str, values: Mapping[str, object]
) -> list[tuple[Any, ...]]:
    """Return the rows of a small query. Raises DatabaseError."""
    with translated("reading the database"), snapshot.connection.cursor() as cursor:
        cursor.execute(query, values)
        return cursor.fetchall()


def table_frame(
    spark: SparkSession,
    snapshot: DatabaseSnapshot,
    table: str,
    columns: Mapping[str, Composable],
    schema: str,
    where: Composable | None,
) -> DataFrame:
    """Return expressions over the rows of a table, read by several tasks.

    `columns` maps the names of `schema` to the expressions. Raises SchemaMissing where
    the database has no such table.
    """
    queries = table_queries(snapshot, table, columns, where)
    return query_frame(spark, snapshot, queries, schema)


def table_queries(
    snapshot: DatabaseSnapshot,
    table: str,
    columns: Mapping[str, Composable],
    where: Composable | None,
) -> list[Composable]:
    """Return queries for expressions over the rows of a table, each for some pages.

    `columns` maps names to the expressions. Raises SchemaMissing where the database has
    no such table.
    """
    kind = require_table(snapshot, table)
    selected = SQL(", ").join(
        SQL("{} AS {}").format(what, Identifier(name)) for name, what in columns.items()
    )
    sources = (
        _page_ranges(snapshot, table)
        if kind in TABLES_WITH_PAGES
        else [(table_name(table), SQL("true"))]
    )
    condition = where or SQL("true")
    return [
        SQL("SELECT {} FROM {} WHERE {} AND {}").format(selected, source, condition, piece)
        for source, piece in sources
    ]


def query_frame(
    spark: SparkSession,
    snapshot: DatabaseSnapshot,
    queries: Sequence[Composable],
    schema: str,
) -> DataFrame:
    """Return the rows of all queries, of which one task reads each.

    The types of `schema` are bigint, boolean and string.
    """
    texts = [query.as_string(snapshot.connection) for query in queries]
    dsn, exported = snapshot.dsn, snapshot.exported

    def read(query: str) -> Iterator[pa.RecordBatch]:
        yield from copy_batches(dsn, exported, query, schema)

    return task_frame(spark, texts, read, schema)


ARROW: Final = {"bigint": pa.int64(), "boolean": pa.bool_(), "string": pa.string()}


def copy_batches(dsn: str, exported: str, query: str, schema: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a query under an exported snapshot.

    Raises DatabaseError, also where the snapshot has ended.
    """
    fields = dict(field.split() for field in schema.split(", "))
    with tempfile.TemporaryFile(buffering=FILE_BUFFER) as file:
        with (
            closing(connect(dsn, application_name=APPLICATION_NAME)) as connection,
            translated("reading the database in a task"),
        ):
            cursor = connection.cursor()
            _begin(cursor)
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (exported,))
            cursor.copy_expert(f"COPY ({query}) TO STDOUT (FORMAT csv)", file)
        if file.tell():
            yield from _parsed_rows(file, fields)


def _parsed_rows(file: IO[bytes], fields: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file of COPY.

    A row must fit in a block of pyarrow. Where one does not, the file is parsed again
    in larger blocks, which cost memory, and the rows that were yielded are left out.
    The parser itself must not skip them: where values have lines, it then loses its
    place (pyarrow 26.0, 2026-11-28).
    """
    block, rows = BLOCK, 0
    file.flush()
    while True:
        end = 0
        try:
            for batch in _csv_reader(_FromStart(file), fields, block):
                end += batch.num_rows
                if end > rows:
                    first, rows = batch.num_rows - (end - rows), end
                    yield batch.slice(first)
        except pa.ArrowInvalid as error:
            if "try to increase block size" not in str(error) or block == LARGEST_BLOCK:
                raise
            block = min(4 * block, LARGEST_BLOCK)
        else:
            return


class _FromStart(io.RawIOBase):
    """A file from its beginning, with a position of its own.

    A reader of pyarrow reads ahead in a thread, also when it has failed: the next one
    would begin where that thread leaves a common position (pyarrow 26.0, 2026-11-29).
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        found = os.pread(self._file.fileno(), size, self._at)
        self._at += len(found)
        return found


def _csv_reader(
    file: io.RawIOBase, fields: Mapping[str, str], block: int
) -> pyarrow.csv.CSVStreamingReader:
    return pyarrow.csv.open_csv(
        file,
        read_options=pyarrow.csv.ReadOptions(column_names=list(fields), block_size=block),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={name: ARROW[kind] for name, kind in fields.items()},
            null_values=[""],
            true_values=["t"],
            false_values=["f"],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,  # COPY quotes an empty text and leaves NULL bare
        ),
    )


def _quoted(snapshot: DatabaseSnapshot, table: str) -> str:
    return table_name(table).as_string(snapshot.connection)


def _page_ranges(snapshot: DatabaseSnapshot, table: str) -> Iterator[tuple[Composable, Composable]]:
    """Yield the page ranges of the table's leaves: a table name and a condition."""
    leaves = fetch(snapshot, _LEAVES, {"table": _quoted(snapshot, table)})
    if not all(is_readable for *_leaf, is_readable in leaves):
        # Whoever may read the whole table need not have rights for its partitions.
        yield table_name(table), SQL("true")
        return
    for leaf, pages, kind, _is_readable in leaves:
        if kind not in TABLES_WITH_PAGES:  # a partition that is a foreign table
            yield SQL(leaf), SQL("true")
            continue
        # The last range has no end, because the size was read a moment after the
        # snapshot.
        for start, end in pairwise([*range(0, pages, TASK_PAGES), None]):
            condition = SQL("ctid >= {}::tid").format(Literal(f"({start},0)"))
            if end is not None:
                condition += SQL(" AND ctid < {}::tid").format(Literal(f"({end},0)"))
            yield SQL(leaf), condition
