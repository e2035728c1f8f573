"""Tables of a business database as DataFrames, all of them as they were at one moment.

The driver opens a read-only transaction and exports its snapshot; the tasks read pieces
of the tables under that same snapshot, by COPY, which Arrow parses. Nothing is written,
and no driver for the JVM is needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.csv
from psycopg2.sql import SQL, Composable, Identifier, Literal
from pyspark.sql import DataFrame, SparkSession

from txmq.errors import SchemaMissing
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.identity import ServerIdentity, read_server
from txmq.tx.postgres.session import Connection, connect

PIECE_PAGES: Final = 8_192  # of a table, read by one task: 64 MiB
IN_MEMORY: Final = 64 << 20  # bytes of a piece before it goes to a file
NAME: Final = "txmq reconcile"

_BEGIN: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL client_encoding = 'UTF8'"
)
_FACTS: Final = """
SELECT pg_export_snapshot(), pg_current_snapshot()::text, (extract(epoch FROM clock_timestamp()) * 1000000)::int8,
       current_database()
"""
# Those that hold rows themselves: a table, or the partitions of one, at any depth.
_LEAVES: Final = """
WITH leaves AS (SELECT relid FROM pg_partition_tree(to_regclass(%(table)s)) WHERE isleaf)
SELECT relid::text, greatest(pg_relation_size(relid) / current_setting('block_size')::int8, 1)
FROM (TABLE leaves UNION ALL SELECT to_regclass(%(table)s) WHERE NOT EXISTS (TABLE leaves)) held ORDER BY 1
"""
_KIND: Final = "SELECT relkind FROM pg_class WHERE oid = to_regclass(%(table)s)"
TABLES: Final = ("r", "p", "m")  # with pages of their own, which views and foreign tables have not


class Snapshot(NamedTuple):
    """A moment in a database that others can be shown, while `connection` keeps its
    transaction open.
    """

    connection: Connection
    dsn: str
    exported: str
    sees: str  # the transactions, in PostgreSQL's words
    at: int  # microseconds, by the server's clock
    database: str
    identity: ServerIdentity


@contextmanager
def snapshot(dsn: str) -> Iterator[Snapshot]:
    """The database as it is now, for the length of the block. Raises DatabaseError."""
    with closing(connect(dsn, application_name=NAME)) as connection:
        identity = read_server(connection).identity
        with translated("taking a snapshot"), connection.cursor() as cursor:
            cursor.execute(_BEGIN)
            cursor.execute(_FACTS)
            [(exported, sees, at, database)] = cursor.fetchall()
        yield Snapshot(connection, dsn, exported, sees, at, database, identity)


def table_name(name: str) -> Identifier:
    """A table's name, with its schema or without, as SQL."""
    return Identifier(*name.split("."))


def exists(taken: Snapshot, table: str) -> bool:
    """Whether there is such a table."""
    return bool(fetch(taken, _KIND, {"table": _quoted(taken, table)}))


def fetch(taken: Snapshot, query: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
    """The rows of a small query, read here. Raises DatabaseError."""
    with translated("reading the database"), taken.connection.cursor() as cursor:
        cursor.execute(query, values)
        return cursor.fetchall()


def table_frame(
    spark: SparkSession,
    taken: Snapshot,
    table: str,
    columns: Mapping[str, Composable],
    schema: str,
    where: Composable | None,
) -> DataFrame:
    """Expressions over a table's rows, by the names of `schema`, read in pieces by as
    many tasks.

    The table stays as it is until the snapshot ends. Raises SchemaMissing where there
    is none.
    """
    kinds = fetch(taken, _KIND, {"table": _quoted(taken, table)})
    if not kinds:
        raise SchemaMissing(
            f"the database has no table {table}", hint="name it with its schema: public.orders"
        )
    selected = SQL(", ").join(
        SQL("{} AS {}").format(what, Identifier(name)) for name, what in columns.items()
    )
    sources = _pieces(taken, table) if kinds[0][0] in TABLES else [(table_name(table), SQL("true"))]
    condition = where or SQL("true")
    queries = [
        SQL("SELECT {} FROM {} WHERE {} AND {}").format(selected, source, condition, piece)
        for source, piece in sources
    ]
    return query_frame(spark, taken, queries, schema)


def query_frame(
    spark: SparkSession, taken: Snapshot, queries: Sequence[Composable], schema: str
) -> DataFrame:
    """The rows of all these queries, each read by one task. `schema` knows bigint,
    boolean and string.
    """
    texts = [(query.as_string(taken.connection),) for query in queries]
    dsn, exported = taken.dsn, taken.exported

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for query in batch.column("query").to_pylist():
                yield from copied(dsn, exported, query, schema)

    plan = spark.createDataFrame(texts, "query string").repartition(len(texts))
    return plan.mapInArrow(read, schema)


ARROW: Final = {"bigint": pa.int64(), "boolean": pa.bool_(), "string": pa.string()}


def copied(dsn: str, exported: str, query: str, schema: str) -> Iterator[pa.RecordBatch]:
    """The rows of a query under an exported snapshot. Raises DatabaseError, also where
    the snapshot has ended.
    """
    fields = dict(field.split() for field in schema.split(", "))
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as file:
        with (
            closing(connect(dsn, application_name=NAME)) as connection,
            translated("reading the database in a task"),
        ):
            cursor = connection.cursor()
            cursor.execute(_BEGIN)
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (exported,))
            cursor.copy_expert(f"COPY ({query}) TO STDOUT (FORMAT csv)", file)
        if not file.tell():
            return
        file.seek(0)
        yield from pyarrow.csv.open_csv(
            file,
            read_options=pyarrow.csv.ReadOptions(column_names=list(fields)),
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


def _quoted(taken: Snapshot, table: str) -> str:
    return table_name(table).as_string(taken.connection)


def _pieces(taken: Snapshot, table: str) -> Iterator[tuple[Composable, Composable]]:
    """Ranges of pages: of each leaf of the table, as SQL, with the condition for the
    range.
    """
    with translated("locking a table against changes"), taken.connection.cursor() as cursor:
        cursor.execute(SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(table_name(table)))
    for leaf, pages in fetch(taken, _LEAVES, {"table": _quoted(taken, table)}):
        # The last piece has no end: how long a table is was asked a moment after the
        # snapshot.
        for start, end in pairwise([*range(0, pages, PIECE_PAGES), None]):
            condition = SQL("ctid >= {}::tid").format(Literal(f"({start},0)"))
            if end is not None:
                condition += SQL(" AND ctid < {}::tid").format(Literal(f"({end},0)"))
            yield SQL(leaf), condition
