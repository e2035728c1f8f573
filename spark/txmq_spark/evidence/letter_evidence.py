"""Evidence about each dead letter, as Spark joins that end in one row per letter.

All frames show the same moment: letters and log up to the published ends, and tables
under one database snapshot that was taken before.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

PLACE: Final = ["topic", "partition", "offset"]
LETTER: Final = ["group", *PLACE]
TOKEN_DIGITS: Final = 32  # a message id begins with its token or producer id
VERSION_DIGIT: Final = 13  # of a UUID: 7 in tokens, 4 in producer ids


class EvidenceTables(NamedTuple):
    """Tables of the database; None where a table was not requested or does not
    exist.
    """

    # topic, partition, lower, upper, group: offsets whose effect is committed
    applied: DataFrame | None = None
    applied_ids: DataFrame | None = None  # message_id
    applied_versions: DataFrame | None = None  # key, version
    tokens: DataFrame | None = None  # token, state, at
    # key, version, token, about; version and token may be null
    business: DataFrame | None = None


def join_evidence(letters: DataFrame, log: DataFrame | None, tables: EvidenceTables) -> DataFrame:
    """Return the letters with their evidence.

    The added columns are `applied`, `later_applied`, `token_state`, `business_row` and
    `current_version`.
    """
    found = letters.join(_applied(letters, log, tables), LETTER, "left")
    if tables.tokens is None:
        found = found.withColumn("token_state", f.lit(None).cast("string"))
    else:
        states = tables.tokens.selectExpr("token", "state AS token_state")
        found = found.join(states, "token", "left")
    return _with_versions(found, tables)


def token_column(column: str) -> Column:
    """Return the token in a message id; null for messages that no transaction sent."""
    return f.when(
        f.substring(column, VERSION_DIGIT, 1) == "7", f.substring(column, 1, TOKEN_DIGITS)
    )


def chain_column() -> Column:
    """Return the chain of a message within its topic: that of its key.

    A message without a key is a chain of its own.
    """
    alone = f.concat_ws("/", f.lit("o"), "partition", "offset")
    return f.when(f.length("key") > 0, f.concat(f.lit("k"), "key")).otherwise(alone)


def _applied(letters: DataFrame, log: DataFrame | None, tables: EvidenceTables) -> DataFrame:
    """Return `applied` and `later_applied` by the place of each letter.

    `later_applied` is the last later message of the key whose effect is committed.
    """
    if log is None or (tables.applied is None and tables.applied_ids is None):
        return letters.selectExpr(
            *[f"`{name}`" for name in LETTER],
            "CAST(NULL AS boolean) applied",
            "CAST(NULL AS bigint) later_applied",
        )
    judged = _with_applied(_candidates(letters, log), tables)
    later = (
        Window.partitionBy("group", "topic", "partition", chain_column())
        .orderBy("offset")
        .rowsBetween(1, Window.unboundedFollowing)
    )
    last = f.max(f.when(f.col("applied") & f.col("key").isNotNull(), f.col("offset"))).over(later)
    return (
        judged.withColumn("later_applied", last)
        .where("letter")
        .select(*LETTER, "applied", "later_applied")
    )


def _candidates(letters: DataFrame, log: DataFrame) -> DataFrame:
    """Return the letters and all other messages of their keys, for each group."""
    columns = [*LETTER, "key", "message_id"]
    keys = letters.where("key IS NOT NULL").select("group", "topic", "key").distinct()
    others = (
        log.join(keys, ["topic", "key"])
        .select(*columns)
        .join(letters.select(*LETTER), LETTER, "left_anti")
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
    columns = [*LETTER, "key", "message_id", "letter"]
    nothing = [f.lit(None).cast("string"), f.lit(None).cast("string"), f.lit(None).cast("boolean")]
    begins = ranges.select("group", "topic", "partition", "lower", *nothing, "upper")
    both = candidates.select(*columns, f.lit(None).cast("bigint").alias("upper")).union(begins)
    before = Window.partitionBy("group", "topic", "partition").orderBy(
        "offset", f.col("upper").isNull()
    )
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
        rows = tables.business.groupBy("about", "key").agg(
            f.max("version").alias("business_version"), f.lit(True).alias("there")
        )
        found = found.join(rows, ["about", "key"], "left")
        business = f.col("business_version")
        known = f.col("key").isNotNull() & f.col("about").isNotNull()
        row = f.when(known, f.col("there").isNotNull())
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
