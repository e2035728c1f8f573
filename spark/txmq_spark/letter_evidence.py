"""Evidence about each dead letter, as Spark joins that end in one row per letter.

All frames show the same moment: letters and log up to the published ends, and tables
under one database snapshot that was taken before.
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
TOKEN_DIGITS: Final = 32  # a message id begins with its token or producer id
VERSION_DIGIT: Final = 13  # of a UUID: 7 in tokens, 4 in producer ids


class EvidenceTables(NamedTuple):
    """Tables of the database; None where a table was not requested or does not
    exist.
    """

    # topic, partition, lower, upper: offsets whose effect is committed
    applied: DataFrame | None = None
    applied_ids: DataFrame | None = None  # message_id
    applied_versions: DataFrame | None = None  # key, version
    tokens: DataFrame | None = None  # token, state
    business: DataFrame | None = None  # key, version, token; version and token may be null


def version_column(source: str | None) -> Column | None:
    """Return the expression for the version of a message.

    The source is `header:NAME`, or `json:PATH` into the body. Raises ConfigError.
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
        "version", f"invalid source {source!r} of the version", hint="use header:NAME or json:PATH"
    )


def join_evidence(
    letters: DataFrame, log: DataFrame, tables: EvidenceTables, version: Column | None
) -> DataFrame:
    """Return the letters with their evidence.

    The added columns are `applied`, `later_applied`, `token`, `token_state`,
    `business_row`, `version` and `current_version`.
    """
    known = letters.select(
        *LETTER_COLUMNS,
        (f.lit(None).cast("bigint") if version is None else version).alias("version"),
        token_column("message_id").alias("token"),
    )
    found = known.join(_applied(known, log, tables), PLACE, "left")
    if tables.tokens is None:
        found = found.withColumn("token_state", f.lit(None).cast("string"))
    else:
        found = found.join(tables.tokens.withColumnRenamed("state", "token_state"), "token", "left")
    return _with_versions(found, tables)


def token_column(column: str) -> Column:
    """Return the token in a message id; null for messages that no transaction sent."""
    return f.when(
        f.substring(column, VERSION_DIGIT, 1) == "7", f.substring(column, 1, TOKEN_DIGITS)
    )


def _applied(letters: DataFrame, log: DataFrame, tables: EvidenceTables) -> DataFrame:
    """Return `applied` and `later_applied` by the place of each letter.

    `later_applied` is the last later message of the key whose effect is committed.
    """
    if tables.applied is None and tables.applied_ids is None:
        return (
            letters.select(*PLACE)
            .distinct()
            .selectExpr(
                *PLACE, "CAST(NULL AS boolean) applied", "CAST(NULL AS bigint) later_applied"
            )
        )
    judged = _with_applied(_candidates(letters, log), tables)
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
    """Return the letters and all other messages of their keys."""
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


def _with_applied(candidates: DataFrame, tables: EvidenceTables) -> DataFrame:
    """Add `applied`, by offset ranges, by message ids, or by both."""
    judged = candidates.withColumn("applied", f.lit(False))
    if tables.applied is not None:
        judged = _applied_by_range(candidates, tables.applied)
    if tables.applied_ids is not None:
        ids = tables.applied_ids.distinct().withColumn("known", f.lit(True))
        judged = judged.join(ids, "message_id", "left")
        judged = judged.withColumn("applied", f.col("applied") | f.col("known").isNotNull()).drop(
            "known"
        )
    return judged


def _applied_by_range(candidates: DataFrame, ranges: DataFrame) -> DataFrame:
    """Add `applied`: the offset is in one of the ranges.

    A join on ranges would compare every row with every range. Instead, offsets and
    ranges are sorted together, ranges by their lower bound. An offset is covered where
    a range with a lower bound at or before it has an upper bound after it.
    """
    columns = [*PLACE, "key", "message_id", "letter"]
    nothing = [f.lit(None).cast("string"), f.lit(None).cast("string"), f.lit(None).cast("boolean")]
    begins = ranges.select("topic", "partition", "lower", *nothing, "upper")
    both = candidates.select(*columns, f.lit(None).cast("bigint").alias("upper")).union(begins)
    before = Window.partitionBy("topic", "partition").orderBy("offset", f.col("upper").isNull())
    covered = f.coalesce(f.max("upper").over(before) > f.col("offset"), f.lit(False))
    return both.withColumn("applied", covered).where("upper IS NULL").select(*columns, "applied")


def _with_versions(found: DataFrame, tables: EvidenceTables) -> DataFrame:
    """Add `business_row` and `current_version`.

    A message is applied where its version is applied.
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


def tokens_without_messages(tokens: DataFrame, log: DataFrame) -> DataFrame:
    """Return committed transactions of the token table without messages in the log.

    The columns are `token` and `at`.
    """
    seen = (
        log.select(token_column("message_id").alias("token")).where("token IS NOT NULL").distinct()
    )
    return (
        tokens.where("state IN ('C', 'D')").join(seen, "token", "left_anti").select("token", "at")
    )


def keys_without_messages(business: DataFrame, log: DataFrame) -> DataFrame:
    """Return the keys of business rows that no message of the log has.

    The only column is `key`.
    """
    return (
        business.where("key IS NOT NULL")
        .select("key")
        .distinct()
        .join(log.select("key").distinct(), "key", "left_anti")
    )
