"""Replay of a plan: Spark hands the letters to the broker, steers, and reports.

The broker puts letters back in their places, in the order of their keys, at one rate
for the plan. So Spark has no part in that but to begin it: the job may be killed at any
time, and run again, which goes on. Outcomes come back into the plan's directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from txmq_spark.evidence.letter_evidence import LETTER
from txmq_spark.plan.broker_plans import follow, hand_over, outcomes, plan_names, require_log, start
from txmq_spark.plan.directory import OUTCOMES, StoredPlan
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.logs import url_of


class ReplayOptions(NamedTuple):
    """Options of a replay; `settings` are those of the broker's plans."""

    url: str
    name: str | None = None  # of the broker's plan; None = made of the digest
    settings: Mapping[str, object] = {}
    operator: str | None = None
    wait: bool = True  # until nothing more happens by itself


class ReplayResult(NamedTuple):
    """The broker's plans as they are, and the letters by outcome; `gone` are those that
    the broker has no more, so that no plan has them.
    """

    plans: tuple[dict[str, Any], ...]
    counts: dict[str, int]
    gone: int = 0

    @property
    def is_over(self) -> bool:
        """True if each letter has its outcome."""
        return all(plan["state"] == "done" for plan in self.plans)


def replay(
    plan: StoredPlan,
    options: ReplayOptions,
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> ReplayResult:
    """Replay the letters of the plan at its log, which may be listed with that of the
    URL. Raises ConfigError where it is neither, RequestRejected.
    """
    url = url_of(options.url, plan.manifest.facts.log_id)
    handed = hand_over(url, plan, options.name, options.settings, options.operator)
    by = {"operator": options.operator, "reason": f"replay {plan.manifest.digest}"}
    names = {one.group: one.name for one in handed}
    with BrokerLink(url) as link:
        for name in names.values():
            start(link, name, by)
        if options.wait:
            shown = follow(link, list(names.values()), tell)
        else:
            shown = [link.call("plan.show", name=name) for name in names.values()]
    counts = write_outcomes(plan, url, names)
    gone = plan.letters.where("replay").count() - sum(counts.values())
    return ReplayResult(tuple(shown), counts, gone)


def write_outcomes(plan: StoredPlan, url: str, names: Mapping[str, str]) -> dict[str, int]:
    """Write the outcomes of the letters beside the plan; return their numbers."""
    path = f"{plan.path}/{OUTCOMES}"
    outcomes(plan.letters.sparkSession, url, names).write.parquet(path, mode="overwrite")
    written = plan.letters.sparkSession.read.parquet(path)
    counts = written.groupBy("outcome").count().orderBy("outcome").collect()
    return {row["outcome"]: row["count"] for row in counts}


def expected(plan: StoredPlan, url: str) -> DataFrame:
    """Return what a replay would do with each letter as of now: `planned`, `refused`
    with a reason, or `gone`. Changes nothing.
    """
    spark, log_id = plan.letters.sparkSession, plan.manifest.facts.log_id
    url = url_of(url, log_id)
    with BrokerLink(url) as link:
        require_log(link, plan)
    groups = ",".join(plan_names(plan, None)) or plan.manifest.facts.groups[0]
    reader = spark.read.format("txmq").options(url=url, letters=groups, log=log_id)
    columns = "`group` string, topic string, partition int, offset bigint, number bigint"
    now = reader.schema(f"{columns}, reserved_by string").load()
    present = now.withColumnRenamed("number", "present")
    joined = plan.letters.where("replay").join(present, LETTER, "left")
    why = (
        f.when(f.col("present").isNull(), "it is no dead letter any more")
        .when(f.col("present") != f.col("number"), "it was replayed since, and died again")
        .when(
            f.col("reserved_by").isNotNull(),
            f.format_string("transaction %s has reserved it", f.col("reserved_by")),
        )
    )
    outcome = f.when(why.isNull(), "planned").when(f.col("present").isNull(), "gone")
    return joined.select(
        *LETTER, "key", outcome.otherwise("refused").alias("outcome"), why.alias("why")
    )
