"""What log and tables say about each dead letter: joins in Spark, one row a letter in
the end.

All frames are of one moment: the letters and the log up to the published ends, the
tables under one snapshot of the database that was taken before.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from txmq.errors import ConfigError

PLACE: Final = ["topic", "partition", "offset"]
LETTER_COLUMNS: Final = [
    *(
        *PLACE,
        "message_id",
        "key",
        "stored_at",
        "dead_at",
        "attempts",
        "error_type",
        "error_text",
        "fingerprint",
    ),
    *("replays", "deaths", "parked", "reserved_by"),
]
TOKEN_DIGITS: Final = 32  # a message id begins with the token or producer id that sent it
VERSION_DIGIT: Final = 13  # of a UUID; tokens are of version 7, producer ids of version 4


class Tables(NamedTuple):
    """What was found in the database; None = not asked for, or not there."""

    applied: DataFrame | None = (
        None  # topic, partition, lower, upper: offsets whose effect is committed
    )
    applied_ids: DataFrame | None = None  # message_id
    applied_versions: DataFrame | None = None  # key, version
    tokens: DataFrame | None = None  # token, state
    business: DataFrame | None = None  # key, and perhaps version


def version_of(source: str | None) -> Column | None:
    """The expression for a message's version: `header:NAME`, or `json:PATH` into its
    body. Raises ConfigError.
    """
    if not source:
        return None
    kind, _, where = source.partition(":")
    if kind == "header" and where:
        return f.col("headers").getItem(where).try_cast("bigint")
    if kind == "json" and where:
        text = f.try_validate_utf8(f.col("body").cast("string"))
        return f.get_json_object(text, f"$.{where}").try_cast("bigint")
    raise ConfigError(
        "version", f"{source!r} does not say where it stands", hint="header:NAME or json:PATH"
    )


def evidence(
    letters: DataFrame, log: DataFrame, tables: Tables, version: Column | None
) -> DataFrame:
    """Each letter with `applied`, `later_applied`, `token`, its state, `business_row`
    and the two versions.
    """
    known = letters.select(
        *LETTER_COLUMNS,
        (f.lit(None).cast("bigint") if version is None else version).alias("version"),
        token_of("message_id").alias("token"),
    )
    found = known.join(_applied(known, log, tables), PLACE, "left")
    if tables.tokens is None:
        found = found.withColumn("token_state", f.lit(None).cast("string"))
    else:
        found = found.join(tables.tokens.withColumnRenamed("state", "token_state"), "token", "left")
    return _versions(found, tables)


def token_of(column: str) -> Column:
    """The token of the transaction that a message id tells of, null for messages of no
    transaction.
    """
    return f.when(
        f.substring(column, VERSION_DIGIT, 1) == "7", f.substring(column, 1, TOKEN_DIGITS)
    )


def _applied(letters: DataFrame, log: DataFrame, tables: Tables) -> DataFrame:
    """By place of a letter: whether its effect is committed, and the last later message
    of its key whose effect is.
    """
    if tables.applied is None and tables.applied_ids is None:
        return (
            letters.select(*PLACE)
            .distinct()
            .selectExpr(
                *PLACE, "CAST(NULL AS boolean) applied", "CAST(NULL AS bigint) later_applied"
            )
        )
    judged = _judged(_candidates(letters, log), tables)
    later = (
        Window.partitionBy("topic", "partition", "key")
        .orderBy("offset")
        .rowsBetween(1, Window.unboundedFollowing)
    )
    last = f.max(f.when(f.col("applied") & f.col("key").isNotNull(), f.col("offset"))).over(later)
    return (
        judged.withColumn("later_applied", last)
        .where("letter")
        .select(*PLACE, "applied", "later_applied")
    )


def _candidates(letters: DataFrame, log: DataFrame) -> DataFrame:
    """The letters, and all other messages of their keys."""
    columns = [*PLACE, "key", "message_id"]
    keys = letters.where("key IS NOT NULL").select("topic", "key").distinct()
    others = (
        log.select(*columns)
        .join(keys, ["topic", "key"], "left_semi")
        .join(letters.select(*PLACE), PLACE, "left_anti")
    )
    return letters.select(*columns, f.lit(True).alias("letter")).union(
        others.select(*columns, f.lit(False))
    )


def _judged(candidates: DataFrame, tables: Tables) -> DataFrame:
    """With `applied`, by offsets, by ids, or both."""
    judged = candidates.withColumn("applied", f.lit(False))
    if tables.applied is not None:
        judged = _within(candidates, tables.applied)
    if tables.applied_ids is not None:
        ids = tables.applied_ids.distinct().withColumn("known", f.lit(True))
        judged = judged.join(ids, "message_id", "left")
        judged = judged.withColumn("applied", f.col("applied") | f.col("known").isNotNull()).drop(
            "known"
        )
    return judged


def _within(candidates: DataFrame, ranges: DataFrame) -> DataFrame:
    """With `applied`: whether the offset lies in one of the ranges.

    A join on a range would compare everything with everything. Sorted together, ranges
    by where they begin, an offset is covered where one that began before it, or at it,
    ends after it.
    """
    columns = [*PLACE, "key", "message_id", "letter"]
    nothing = [f.lit(None).cast("string"), f.lit(None).cast("string"), f.lit(None).cast("boolean")]
    begins = ranges.select("topic", "partition", "lower", *nothing, "upper")
    both = candidates.select(*columns, f.lit(None).cast("bigint").alias("upper")).union(begins)
    before = Window.partitionBy("topic", "partition").orderBy("offset", f.col("upper").isNull())
    covered = f.coalesce(f.max("upper").over(before) > f.col("offset"), f.lit(False))
    return both.withColumn("applied", covered).where("upper IS NULL").select(*columns, "applied")


def _versions(found: DataFrame, tables: Tables) -> DataFrame:
    """With `business_row` and `current_version`; a version that is applied means that
    its message is.
    """
    none = f.lit(None).cast("bigint")
    business, applied = none, none
    row = f.lit(None).cast("boolean")
    if tables.business is not None:
        rows = tables.business.groupBy("key").agg(
            f.max("version").alias("business_version"), f.lit(True).alias("there")
        )
        found = found.join(rows, "key", "left")
        business = f.col("business_version")
        row = f.when(f.col("key").isNotNull(), f.col("there").isNotNull())
    if tables.applied_versions is not None:
        rows = tables.applied_versions.groupBy("key").agg(f.max("version").alias("applied_version"))
        found = found.join(rows, "key", "left")
        applied = f.col("applied_version")
    same = f.coalesce(f.col("version") == applied, f.lit(False))
    return found.withColumns(
        {
            "business_row": row,
            "current_version": f.greatest(business, applied),
            "applied": f.when(same, f.lit(True)).otherwise(f.col("applied")),
        }
    )


def unseen_tokens(tokens: DataFrame, log: DataFrame) -> DataFrame:
    """Committed transactions of the token table whose messages are not in the log:
    `token`, `at`.
    """
    seen = log.select(token_of("message_id").alias("token")).where("token IS NOT NULL").distinct()
    return (
        tokens.where("state IN ('C', 'D')").join(seen, "token", "left_anti").select("token", "at")
    )


def unseen_keys(business: DataFrame, log: DataFrame) -> DataFrame:
    """Keys of business rows that no message of the log has: `key`."""
    return (
        business.where("key IS NOT NULL")
        .select("key")
        .distinct()
        .join(log.select("key").distinct(), "key", "left_anti")
    )
