"""Tables that serve as evidence, as frames of one snapshot: those of txmq, and those of
the business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

import psycopg2
from psycopg2.sql import NULL, SQL, Identifier, Literal
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from txmq.errors import ConfigError
from txmq.tx.postgres.errors import translate, translated
from txmq.tx.postgres.partitions import partitions
from txmq_spark.database.mapping import BusinessTable
from txmq_spark.database.mapping import Mapping as TableMapping
from txmq_spark.database.snapshot import (
    DatabaseSnapshot,
    fetch,
    query_frame,
    table_exists,
    table_frame,
    table_queries,
)
from txmq_spark.evidence.letter_evidence import EvidenceTables
from txmq_spark.session.kept_frames import KeptFrames

TOKENS, RECENT = "public.txmq_token", "public.txmq_inbox_recent"
FOLDED: Final = "public.txmq_inbox"
# Results of --applied-query, by the names of the columns.
APPLIED_COLUMNS: Final = {
    frozenset({"message_id"}): "message_id string",
    frozenset({"topic", "partition", "offset"}): "topic string, partition bigint, offset bigint",
    frozenset({"key", "version"}): "key string, version bigint",
}
TYPES: Final = {"string": SQL("text"), "bigint": SQL("int8")}
FRACTIONS: Final = {700: "real", 701: "double precision", 1700: "numeric"}  # by pg_type.oid

# A semicolon, with comments behind it. Without a quotation mark and an end of a comment
# in these, the semicolon cannot be part of a text, a name or a comment.
BEHIND_QUERY: Final = re.compile(r""";[\s;]*(--[^\n'"$*]*(\n[\s;]*|$))+$""")
WRITER: Final = "^[0-9a-f]{12}7[0-9a-f]{19}$"
# The statements of a text are counted before any of them is carried out: with a
# parenthesis of its own it could end the transaction that cannot write.
_OPEN: Final = """
DO $$
DECLARE
    opened refcursor;
BEGIN
    OPEN opened FOR EXECUTE current_setting('txmq.probe');
    CLOSE opened;
END $$
"""
# The tables and views that this transaction has read, or is about to read.
_READ: Final = """
SELECT nspname, relname FROM pg_locks
JOIN pg_class ON pg_class.oid = relation JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE locktype = 'relation' AND pid = pg_backend_pid() AND relkind IN ('r', 'p', 'v')
    AND nspname NOT IN ('pg_catalog', 'information_schema')
    AND has_table_privilege(relation, 'SELECT')
"""
LAST_OFFSET: Final = 2**63 - 1


class GroupPartition(NamedTuple):
    """A partition of a consumer group as the broker and the inbox identify it: its
    messages [first, end) have this epoch.
    """

    topic: str
    topic_id: int
    partition: int
    epoch: int
    first: int = 0
    end: int = LAST_OFFSET

    @classmethod
    def of(cls, position: Mapping[str, Any]) -> Iterator[GroupPartition]:
        """Yield the parts of a position of `group.show`, one for each epoch."""
        steps = position["epochs"]
        ends = [*(first for first, _epoch in steps[1:]), LAST_OFFSET]
        for (first, epoch), end in zip(steps, ends, strict=True):
            yield cls(
                position["topic"], position["topic_id"], position["partition"], epoch, first, end
            )


class GroupIdentity(NamedTuple):
    """A consumer group as the broker and the inbox identify it."""

    name: str
    log_id: str
    partitions: tuple[GroupPartition, ...] = ()


def read_tables(
    spark: SparkSession,
    snapshot: DatabaseSnapshot,
    groups: Sequence[GroupIdentity],
    mapping: TableMapping,
    kept: KeptFrames | None = None,
) -> EvidenceTables:
    """Return the tables that exist and those that were requested. Each is read once
    where frames are `kept`.

    Raises SchemaMissing, ConfigError, DatabaseError.
    """
    applied = [
        inbox_ranges(spark, snapshot, group).withColumn("group", f.lit(group.name))
        for group in groups
        if table_exists(snapshot, RECENT)
    ]
    tokens = None
    if table_exists(snapshot, TOKENS):
        tokens = decided_tokens(spark, snapshot, groups[0].log_id)
    business = [
        business_rows(spark, snapshot, table).withColumn("about", f.lit(about))
        for about, table in enumerate(mapping.tables)
    ]
    found = EvidenceTables(_all(applied), tokens=tokens, business=_all(business))
    if mapping.applied:
        found = _with_query(spark, snapshot, found, mapping.applied, groups[0].name)
    if kept is not None:
        found = EvidenceTables(*(table and kept.keep(table) for table in found))
    if any(table.token for table in mapping.tables) and found.business is not None:
        found = found._replace(tokens=_with_writers(found.tokens, found.business))
    return found


def evidence_names(mapping: TableMapping) -> list[str]:
    """Return the names of all tables that are read, where they exist."""
    return [TOKENS, RECENT, FOLDED, *(table.name for table in mapping.tables)]


def query_tables(snapshot: DatabaseSnapshot, query: str) -> list[Identifier]:
    """Return the tables and views that a query names, as far as this role may lock
    them. A view that it may lock locks its tables.

    Raises ConfigError where the query fails, or has other columns than it should.
    """
    _query_columns(snapshot, query)
    return [Identifier(*name) for name in fetch(snapshot, _READ, {})]


def _all(frames: Sequence[DataFrame]) -> DataFrame | None:
    """Return the rows of all frames; None where there is no frame."""
    return reduce(DataFrame.union, frames) if frames else None


def oldest_token(snapshot: DatabaseSnapshot) -> str | None:
    """Return the lowest token whose row cannot have been dropped, in hex digits.

    Returns None where no row has been dropped yet, or the database has no such rows.
    """
    if not table_exists(snapshot, TOKENS):
        return None
    with translated("reading the database"):
        known = list(partitions(snapshot.connection))
    closed = [partition.upper for partition in known if partition.lower is None]
    return max(closed).hex if closed else None


def inbox_ranges(
    spark: SparkSession, snapshot: DatabaseSnapshot, group: GroupIdentity
) -> DataFrame:
    """Return the offsets whose effect is committed, as ranges.

    The columns are topic, partition, lower and upper.
    """
    schema = "topic string, partition bigint, lower bigint, upper bigint"
    if not group.partitions:
        return query_frame(spark, snapshot, [], schema)
    places = SQL("(VALUES {}) AS place (of_topic, number, its_epoch, low, high)").format(
        SQL(", ").join(
            SQL("({}, {}, {}, {}::int8, {}::int8)").format(*map(Literal, place[1:]))
            for place in group.partitions
        )
    )
    of_group = SQL("grp = {} AND log_id = {}::uuid").format(
        Literal(group.name), Literal(group.log_id)
    )
    here = SQL("of_topic = topic_id AND number = partition AND its_epoch = epoch")
    mine = SQL('{} AND EXISTS (SELECT FROM {} WHERE {} AND "offset" >= low AND "offset" < high)')
    names = {place.topic_id: place.topic for place in group.partitions}
    topic = SQL("CASE topic_id {} END").format(
        SQL(" ").join(
            SQL("WHEN {} THEN {}").format(Literal(number), Literal(name))
            for number, name in names.items()
        )
    )
    columns = {
        "topic": topic,
        "partition": Identifier("partition"),
        "lower": Identifier("offset"),
        "upper": SQL('"offset" + 1'),
    }
    recent = table_queries(snapshot, RECENT, columns, mine.format(of_group, places, here))
    folded = SQL(
        "SELECT {}, partition, lower(r), upper(r)"
        " FROM public.txmq_inbox, {}, unnest(applied * int8multirange(int8range(low, high))) r"
        " WHERE {} AND {}"
    )
    queries = [*recent, folded.format(topic, places, of_group, here)]
    return query_frame(spark, snapshot, queries, schema)


def decided_tokens(spark: SparkSession, snapshot: DatabaseSnapshot, log_id: str) -> DataFrame:
    """Return the decided transactions of this broker.

    The columns are token, state, and at in microseconds.
    """
    columns = {
        "token": SQL("replace(tok::text, '-', '')"),
        "state": SQL("state::text"),
        "at": SQL("(extract(epoch FROM at) * 1000000)::int8"),
    }
    mine = SQL("log_id = {}::uuid").format(Literal(log_id))
    schema = "token string, state string, at bigint"
    return table_frame(spark, snapshot, TOKENS, columns, schema, mine)


def business_rows(
    spark: SparkSession, snapshot: DatabaseSnapshot, business: BusinessTable
) -> DataFrame:
    """Return the business table as key, version and token.

    A column that the table does not have is null.
    """
    columns = {
        "key": SQL("{}::text").format(Identifier(business.key)),
        "version": SQL("{}::int8").format(
            Identifier(business.version) if business.version else NULL
        ),
        "token": SQL("replace({}::text, '-', '')").format(
            Identifier(business.token) if business.token else NULL
        ),
    }
    schema = "key string, version bigint, token string"
    return table_frame(spark, snapshot, business.name, columns, schema, None)


def _with_writers(known: DataFrame | None, business: DataFrame) -> DataFrame:
    """Add the tokens of business rows to those of the token table.

    Business rows stay when the token table has dropped its rows. What is no token of a
    transaction is left out.
    """
    given = business.selectExpr("lower(token) AS token").where(f.col("token").rlike(WRITER))
    writers = given.selectExpr("token", "'C' AS state", "CAST(NULL AS bigint) AS at")
    everyone = writers if known is None else known.union(writers)
    return everyone.groupBy("token").agg(f.max("state").alias("state"), f.max("at").alias("at"))


def _with_query(
    spark: SparkSession, snapshot: DatabaseSnapshot, found: EvidenceTables, query: str, group: str
) -> EvidenceTables:
    schema = APPLIED_COLUMNS[_query_columns(snapshot, query)]
    columns = [
        SQL("{}::{}").format(Identifier(name), TYPES[kind])
        for name, kind in map(str.split, schema.split(", "))
    ]
    selected = SQL("SELECT {} FROM ({}\n) known").format(SQL(", ").join(columns), _bare(query))
    rows = query_frame(spark, snapshot, [selected], schema)
    if "message_id" in rows.columns:
        return found._replace(applied_ids=rows)
    if "key" in rows.columns:
        return found._replace(applied_versions=rows)
    ranges = rows.selectExpr(
        "topic", "partition", "offset AS lower", "offset + 1 AS upper"
    ).withColumn("group", f.lit(group))
    return found._replace(
        applied=found.applied.union(ranges) if found.applied is not None else ranges
    )


def _bare(query: str) -> SQL:
    """Return a query without its last semicolon, and without comments behind that.

    A comment at the end of what is returned ends with the line.
    """
    return SQL(BEHIND_QUERY.sub("", query.strip()).rstrip(";"))


def _query_columns(snapshot: DatabaseSnapshot, query: str) -> frozenset[str]:
    """Return the column names of a query.

    Raises ConfigError where they are none of the supported sets.
    """
    probe = SQL("SELECT * FROM ({}\n) probe LIMIT 0").format(_bare(query))
    text = probe.as_string(snapshot.connection)
    try:
        with snapshot.connection.cursor() as cursor:
            cursor.execute("SELECT set_config('txmq.probe', %s, true)", (text,))
            cursor.execute(_OPEN)
            cursor.execute(text)
            found = {column.name: column.type_code for column in cursor.description or ()}
            listed = [column.name for column in cursor.description or ()]
    except (psycopg2.Error, ValueError) as error:  # ValueError: a text with a character zero
        raise ConfigError(
            "applied-query", translate(error, "the query fails").message, hint="try it in psql"
        ) from None
    names = frozenset(listed)
    if names not in APPLIED_COLUMNS or len(names) < len(listed):
        forms = "; or ".join(", ".join(sorted(form)) for form in APPLIED_COLUMNS)
        raise ConfigError(
            "applied-query",
            f"the query returns the columns {', '.join(sorted(listed))}",
            hint=f"return one of these sets of columns: {forms}",
        )
    for field in APPLIED_COLUMNS[names].split(", "):
        name, kind = field.split()
        # A cast would round 1.5 to another version, and fail in a task for NaN.
        if kind == "bigint" and found[name] in FRACTIONS:
            raise ConfigError(
                "applied-query",
                f"column {name} is of type {FRACTIONS[found[name]]}, not a whole number",
                hint=f"return {name}::bigint where that is exact",
            )
    return names
