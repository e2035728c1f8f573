"""A plan as a table of PostgreSQL, for those who ask in SQL.

Each part is written by one task, in one transaction that replaces what an earlier
attempt has left. So a task that is tried twice, or a job that runs twice, writes each
letter once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import pyarrow as pa
import pyarrow.csv
from psycopg2.sql import SQL, Composed, Identifier
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from txmq.errors import ConfigError
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection, Cursor, connect
from txmq_spark.database.snapshot import APPLICATION_NAME
from txmq_spark.database.sql_tables import create, table_name
from txmq_spark.plan.directory import StoredPlan
from txmq_spark.plan.parts import COLUMNS, whole_parts

TYPES: Final = {"string": "text", "bigint": "int8", "int": "int4", "boolean": "boolean"}
FIRST: Final = ("plan", "part")  # of a table's columns


def write_table(plan: StoredPlan, dsn: str, table: str) -> int:
    """Write the letters of a plan into a table, which is made where it is missing.

    Return their number. Raises ConfigError where a table of that name has other
    columns, DatabaseError.
    """
    digest = plan.manifest.digest
    with closing(connect(dsn, application_name=APPLICATION_NAME)) as connection:
        _make(connection, table)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with closing(connect(dsn, application_name=APPLICATION_NAME)) as connection:
            written = _write(connection, table, digest, batches)
            yield pa.RecordBatch.from_pydict({"letters": pa.array([written], pa.int64())})

    whole = whole_parts(_as_texts(plan.letters), max(1, len(plan.manifest.parts)))
    counts = whole.mapInArrow(write, "letters bigint").collect()
    return sum(row["letters"] for row in counts)


def _as_texts(letters: DataFrame) -> DataFrame:
    """Return the columns with texts that PostgreSQL takes: it has no character zero."""
    texts = {
        name: f.translate(name, "\0", "\ufffd")
        for name, kind in COLUMNS.items()
        if kind == "string"
    }
    return letters.select("part", *COLUMNS).withColumns(texts)


def _make(connection: Connection, table: str) -> None:
    columns = SQL(", ").join(
        SQL("{} {}").format(Identifier(name), SQL(TYPES[kind])) for name, kind in COLUMNS.items()
    )
    with translated("making the table of plans"), connection.cursor() as cursor:
        create(
            cursor,
            SQL(
                "CREATE TABLE IF NOT EXISTS {} (plan text NOT NULL, part int4 NOT NULL, {},"
                ' PRIMARY KEY (plan, "group", topic, partition, "offset"))'
            ).format(table_name(table), columns),
        )
        cursor.execute(SQL("SELECT * FROM {} LIMIT 0").format(table_name(table)))
        names = {column.name for column in cursor.description or ()}
    if missing := {*FIRST, *COLUMNS} - names:
        raise ConfigError(
            f"table {table}",
            f"it has no column {', '.join(sorted(missing))}",
            hint="name another table, which is made then",
        )


def _write(
    connection: Connection, table: str, digest: str, batches: Iterator[pa.RecordBatch]
) -> int:
    """Write the parts of a task in one transaction."""
    written, begun = 0, set[int]()
    copy = SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(
        table_name(table), SQL(", ").join(map(Identifier, ("plan", "part", *COLUMNS)))
    )
    with translated("writing the table of plans"), connection.cursor() as cursor:
        cursor.execute("BEGIN")
        for batch in batches:
            for part in set(batch.column("part").to_pylist()) - begun:
                begun.add(part)
                _begin_part(cursor, table, digest, part)
            cursor.copy_expert(copy, _as_csv(batch, digest))
            written += batch.num_rows
        cursor.execute("COMMIT")
    return written


def _begin_part(cursor: Cursor, table: str, digest: str, part: int) -> None:
    """Remove what another attempt has written; one that is under way is waited for."""
    remove: Composed = SQL("DELETE FROM {} WHERE plan = %s AND part = %s").format(table_name(table))
    lock = "SELECT pg_advisory_xact_lock(hashtextextended(%s, %s))"
    cursor.execute(lock, (f"{table} {digest}", part))
    cursor.execute(remove, (digest, part))


def _as_csv(batch: pa.RecordBatch, digest: str) -> io.BytesIO:
    named = batch.select(["part", *COLUMNS]).add_column(
        0, "plan", pa.array([digest] * batch.num_rows, pa.string())
    )
    sink = io.BytesIO()
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")
    pyarrow.csv.write_csv(named, sink, options)
    sink.seek(0)
    return sink
