"""Rows and transactions of the database without messages in the log, and messages
without rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from txmq.model.units import DAY, MILLISECOND
from txmq_spark.database.mapping import Mapping
from txmq_spark.database.snapshot import DatabaseSnapshot
from txmq_spark.evidence.inputs import Inputs
from txmq_spark.evidence.letter_evidence import EvidenceTables, token_column
from txmq_spark.evidence.token_states import broker_states
from txmq_spark.session.kept_frames import KeptFrames

# the broker keeps outcomes of transactions for so long
OUTCOME_KEPT_US: Final = 7 * DAY
MISSING: Final = "what string, `table` string, name string, state string, at bigint"
# What a transaction is whose messages are not in the log, by its state at the broker.
STATES: Final = {
    "OPEN": "pending",
    "UNDECIDED": "pending",
    "COMMITTED": "pending",
    "ROLLED_BACK": "rolled back",
}


def missing_rows(
    spark: SparkSession,
    inputs: Inputs,
    mapping: Mapping,
    tables: EvidenceTables,
    log: DataFrame | None,
    kept: KeptFrames,
) -> DataFrame:
    """Return what is missing, as `MissingMessage` explains; `log` has the messages of
    all logs. Without a log it is nothing.
    """
    nothing = [f"CAST(NULL AS {kind}) {name}" for name, kind in map(str.split, MISSING.split(", "))]
    found = spark.range(0).selectExpr(*nothing)
    if log is None:
        return found
    if tables.tokens is not None and inputs.snapshot is not None:
        silent = kept.keep(tokens_without_messages(tables.tokens, log))
        found = found.union(_lost_transactions(silent, inputs.urls, inputs.snapshot))
    if tables.business is not None:
        apart = keys_apart(tables.business, log, mapping.partly_read(inputs.ends))
        found = found.union(
            _lost_keys(apart, mapping, "removed?" if inputs.may_lack_messages else "missing")
        )
    return found


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


def keys_apart(business: DataFrame, log: DataFrame, partly: Sequence[int] = ()) -> DataFrame:
    """Return the keys that only messages or only business rows have.

    Of the tables `partly`, the log has some of the messages, so that rows without one
    tell nothing. The columns are `about`, `key`, and `told`: 1 = messages have it.
    """
    told = log.where("about IS NOT NULL").select("about", "key", f.lit(1).alias("told"))
    rows = business.select("about", "key", f.lit(0).alias("told"))
    apart = (
        told.union(rows)
        .where("key IS NOT NULL")
        .groupBy("about", "key")
        .agg(f.min("told").alias("least"), f.max("told").alias("told"))
        .where("least = told")
        .drop("least")
    )
    if not partly:
        return apart
    return apart.where((f.col("told") == 1) | ~f.col("about").isin(*partly))


def _lost_transactions(
    silent: DataFrame, urls: Sequence[str], snapshot: DatabaseSnapshot
) -> DataFrame:
    """Return committed transactions without messages, but for those whose messages are
    in other topics, or that had none.
    """
    asked = broker_states(silent, urls, snapshot.identity)
    millis = f.conv(f.substring("token", 1, 12), 16, 10).cast("bigint")
    kept = millis * MILLISECOND > snapshot.at - OUTCOME_KEPT_US
    state = reduce(
        lambda column, one: column.when(f.col("known") == one[0], one[1]),
        STATES.items(),
        f.when(f.col("known").isNull(), f.when(kept, "missing").otherwise("forgotten")),
    )
    return (
        silent.join(asked, "token", "left")
        .withColumn("state", state)
        .where("state IS NOT NULL")
        .select(f.lit("transaction"), f.lit(None).cast("string"), "token", "state", "at")
    )


def _lost_keys(apart: DataFrame, mapping: Mapping, without_message: str) -> DataFrame:
    """Return rows without messages, in the state `without_message`, and messages
    without rows.
    """
    names = f.array(*(f.lit(table.name) for table in mapping.tables))
    of_messages = f.col("told") == 1
    return apart.select(
        f.when(of_messages, "row").otherwise("key"),
        names[f.col("about")],
        "key",
        f.when(of_messages, "missing").otherwise(without_message),
        f.lit(None).cast("bigint"),
    )
