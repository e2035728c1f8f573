"""Plans of letters, written without a reconciliation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.spark.letters import letter, letter_frame
from txmq_spark.evidence.missing_messages import MISSING
from txmq_spark.plan.directory import (
    PlanFilters,
    PlanInputs,
    PlanMade,
    PlanManifest,
    StoredPlan,
    write_plan,
)
from txmq_spark.plan.parts import arranged, in_parts, part_digests
from txmq_spark.plan.rules import LetterClass, PlanRules, classified
from txmq_spark.source.broker_link import BrokerLink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def planned(
    path: Path, letters: DataFrame, *, log_id: str = "l", rules: PlanRules | None = None
) -> StoredPlan:
    """Write a plan of these letters."""
    spark, rules = letters.sparkSession, rules or PlanRules()
    placed = in_parts(letters)
    kept = arranged(classified(placed.frame, rules), placed.parts).persist()
    counts = {row["group"]: row["count"] for row in kept.groupBy("group").count().collect()}
    manifest = PlanManifest(
        facts=PlanInputs(groups=tuple(sorted(counts)), log_id=log_id, firsts={}, ends={}),
        filters=PlanFilters.of(rules),
        letters={group: {LetterClass.REPLAY_ALONE: count} for group, count in counts.items()},
        replays=counts,
        parts=part_digests(kept),
    )
    missing = spark.createDataFrame([], MISSING)
    stored = write_plan(str(path), manifest.sealed(), PlanMade(), kept, missing)
    kept.unpersist()
    return stored


def plan_of(spark: SparkSession, path: Path, url: str, group: str) -> StoredPlan:
    """Write a plan of all open letters of a group."""
    with BrokerLink(url) as link:
        letters = [
            letter(told["offset"], told["key"])
            | {name: told[name] for name in ("group", "topic", "partition", "number", "stored_at")}
            | {"parked": told["parked_behind"], "dead_at": told["dead_at"]}
            for told in link.letters(group, bodies=False)
        ]
        return planned(path, letter_frame(spark, letters), log_id=link.log_id)
