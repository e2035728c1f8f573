"""The tables that bear witness: txmq's own, and those of the business, as frames of one
snapshot.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import psycopg2
from psycopg2.sql import NULL, SQL, Identifier, Literal
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from txmq.errors import ConfigError
from txmq.tx.postgres.errors import translate
from txmq.tx.postgres.partitions import partitions
from txmq_spark.evidence import Tables
from txmq_spark.postgres import Snapshot, exists, query_frame, table_frame

TOKENS, RECENT = "public.txmq_token", "public.txmq_inbox_recent"
# What an applied query may give, by the names of its columns.
FORMS: Final = {
    frozenset({"message_id"}): "message_id string",
    frozenset({"topic", "partition", "offset"}): "topic string, partition bigint, offset bigint",
    frozenset({"key", "version"}): "key string, version bigint",
}
TYPES: Final = {"string": SQL("text"), "bigint": SQL("int8")}


class Business(NamedTuple):
    """A table whose rows messages speak of, as its producer keeps it; names of
    columns.
    """

    table: str
    key: str
    version: str | None = None
    token: str | None = None  # of the transaction that wrote the row, as text or uuid


class Group(NamedTuple):
    """A consumer group, as the broker and its inbox know it."""

    name: str
    epoch: int
    log_id: str


def tables(
    spark: SparkSession,
    taken: Snapshot,
    group: Group,
    business: Business | None,
    applied_query: str | None,
) -> Tables:
    """All that the database holds of this. Raises SchemaMissing, ConfigError,
    DatabaseError.
    """
    found = Tables(
        applied=inbox(spark, taken, group) if exists(taken, RECENT) else None,
        tokens=tokens(spark, taken, group.log_id) if exists(taken, TOKENS) else None,
        business=business_rows(spark, taken, business) if business else None,
    )
    if business and business.token and found.business is not None:
        found = found._replace(tokens=_with_writers(found.tokens, found.business))
    return _with_query(spark, taken, found, applied_query) if applied_query else found


def oldest_token(taken: Snapshot) -> str | None:
    """The lowest token whose row would still be there, as hex digits; None where the
    table knows no limit.
    """
    closed = [
        partition.upper for partition in partitions(taken.connection) if partition.lower is None
    ]
    return max(closed).hex if closed else None


def inbox(spark: SparkSession, taken: Snapshot, group: Group) -> DataFrame:
    """Offsets whose effect is committed, as ranges: topic, partition, lower, upper."""
    mine = SQL("grp = {} AND epoch = {}").format(Literal(group.name), Literal(group.epoch))
    schema = "topic string, partition bigint, lower bigint, upper bigint"
    columns = {
        "topic": Identifier("topic"),
        "partition": Identifier("partition"),
        "lower": Identifier("offset"),
        "upper": SQL('"offset" + 1'),
    }
    recent = table_frame(spark, taken, RECENT, columns, schema, mine)
    folded = SQL(
        "SELECT topic, partition, lower(r), upper(r) FROM public.txmq_inbox, unnest(applied) r WHERE {}"
    )
    return recent.union(query_frame(spark, taken, [folded.format(mine)], schema))


def tokens(spark: SparkSession, taken: Snapshot, log_id: str) -> DataFrame:
    """Decided transactions of this broker: token, state, at (microseconds)."""
    columns = {
        "token": SQL("replace(tok::text, '-', '')"),
        "state": SQL("state::text"),
        "at": SQL("(extract(epoch FROM at) * 1000000)::int8"),
    }
    mine = SQL("log_id = {}::uuid").format(Literal(log_id))
    return table_frame(spark, taken, TOKENS, columns, "token string, state string, at bigint", mine)


def business_rows(spark: SparkSession, taken: Snapshot, business: Business) -> DataFrame:
    """The business table: key, version, token; null where it has no such column."""
    columns = {
        "key": SQL("{}::text").format(Identifier(business.key)),
        "version": SQL("{}::int8").format(
            Identifier(business.version) if business.version else NULL
        ),
        "token": SQL("replace({}::text, '-', '')").format(
            Identifier(business.token) if business.token else NULL
        ),
    }
    return table_frame(
        spark, taken, business.table, columns, "key string, version bigint, token string", None
    )


def _with_writers(known: DataFrame | None, business: DataFrame) -> DataFrame:
    """Tokens with those that the business keeps in its rows: they bear witness longer
    than the token table.
    """
    writers = business.where("token IS NOT NULL").selectExpr(
        "token", "'C' AS state", "CAST(NULL AS bigint) AS at"
    )
    everyone = writers if known is None else known.union(writers)
    return everyone.groupBy("token").agg(f.max("state").alias("state"), f.max("at").alias("at"))


def _with_query(spark: SparkSession, taken: Snapshot, found: Tables, query: str) -> Tables:
    schema = FORMS[_form(taken, query)]
    columns = [
        SQL("{}::{}").format(Identifier(name), TYPES[kind])
        for name, kind in map(str.split, schema.split(", "))
    ]
    selected = SQL("SELECT {} FROM ({}) known").format(
        SQL(", ").join(columns), SQL(query.strip().rstrip(";"))
    )
    rows = query_frame(spark, taken, [selected], schema)
    if "message_id" in rows.columns:
        return found._replace(applied_ids=rows)
    if "key" in rows.columns:
        return found._replace(applied_versions=rows)
    ranges = rows.selectExpr("topic", "partition", "offset AS lower", "offset + 1 AS upper")
    return found._replace(
        applied=found.applied.union(ranges) if found.applied is not None else ranges
    )


def _form(taken: Snapshot, query: str) -> frozenset[str]:
    """The names of the columns that a query gives. Raises ConfigError where they say
    nothing here.
    """
    probe = SQL("SELECT * FROM ({}) probe LIMIT 0").format(SQL(query.strip().rstrip(";")))
    try:
        with taken.connection.cursor() as cursor:
            cursor.execute(probe)
            names = frozenset(column.name for column in cursor.description or ())
    except psycopg2.Error as error:
        raise ConfigError(
            "applied-query", translate(error, "it fails").message, hint="try it in psql"
        ) from None
    if names not in FORMS:
        forms = "; or ".join(", ".join(sorted(form)) for form in FORMS)
        raise ConfigError(
            "applied-query",
            f"it gives {', '.join(sorted(names))}",
            hint=f"name its columns: {forms}",
        )
    return names
