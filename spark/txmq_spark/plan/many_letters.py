"""Letters of a plan and what is missing beside them, in executors: they count and write
them.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as f

from txmq_spark.evidence.letter_evidence import LETTER
from txmq_spark.plan.parts import PlanPart, part_digests
from txmq_spark.plan.summary import (
    AGES,
    LISTED_LETTERS,
    LISTED_MISSING,
    OLDER,
    TOP_FAILURES,
    TOP_KEYS,
    Concentration,
    Failure,
    KeyCount,
    LetterCount,
    MissingMessage,
    MissingSummary,
    PlanSummary,
    summary_of,
)
from txmq_spark.session.concurrent_actions import at_once
from txmq_spark.session.kept_frames import KeptFrames


class ManyLetters(NamedTuple):
    """The letters of a plan, each part of which is sorted in one task."""

    rows: DataFrame

    def youngest(self) -> int:
        """Return the time of the last death in microseconds; 0 = there are no
        letters.
        """
        found = self.rows.agg(f.max("dead_at").alias("at")).first()
        return int((found and found["at"]) or 0)

    def part_digests(self) -> tuple[PlanPart, ...]:
        """Return the digests of all parts."""
        return part_digests(self.rows)

    def summary(self, missing: MissingSummary, now: int) -> PlanSummary:
        """Return the summary; `missing` is what is missing beside the letters, and
        `now` the time of ages.
        """
        kinds = self.rows.withColumn("age", _age(now)).groupBy("group", "class", "replay", "age")
        counts, failures, keys, samples = at_once(
            self.rows.sparkSession, kinds.count().collect, self._failures, self._keys, self._samples
        )
        counted = [LetterCount(*row) for row in counts]
        return summary_of(counted, failures, keys, samples, missing, now)

    def write(self, path: str) -> None:
        """Write the letters as Parquet, with a directory for each part."""
        self.rows.write.partitionBy("part").parquet(path, mode="overwrite")

    def _failures(self) -> tuple[tuple[Failure, ...], tuple[int, int]]:
        found = self.rows.groupBy("error_type", "fingerprint").agg(
            f.count("*").alias("letters"), f.min("error").alias("error")
        )
        every = Window.partitionBy()
        totals = {"kinds": f.count("*").over(every), "all": f.sum("letters").over(every)}
        order: list[Column | str] = [f.desc("letters"), "error_type", "fingerprint"]
        rows = found.withColumns(totals).orderBy(*order).limit(TOP_FAILURES).collect()
        if not rows:
            return (), (0, 0)
        top = tuple(
            Failure(
                row["error_type"] or "", row["fingerprint"] or "", row["error"] or "", row.letters
            )
            for row in rows
        )
        return top, (rows[0]["kinds"] - len(top), rows[0]["all"] - sum(one.letters for one in top))

    def _keys(self) -> Concentration:
        keyed = self.rows.where("key IS NOT NULL").groupBy("group", "topic", "key")
        counted = keyed.agg(
            f.count("*").alias("letters"),
            f.sum(f.col("replay").cast("int")).alias("replayed"),
            f.min("dead_at").alias("oldest"),
        )
        counts = [f.count("*").alias("keys"), f.sum("letters").alias("letters")]
        order: list[Column | str] = [f.desc("letters"), "group", "topic", "key"]
        with KeptFrames() as kept:
            kept.keep(counted)
            totals = counted.agg(*counts).first()
            top = tuple(KeyCount(*row) for row in counted.orderBy(*order).limit(TOP_KEYS).collect())
        assert totals is not None, "an aggregation has a row"
        return Concentration(totals["keys"], totals["letters"] or 0, top)

    def _samples(self) -> tuple[dict[str, Any], ...]:
        """Return the first letters of each class."""
        number = f.row_number().over(Window.partitionBy("class").orderBy(*LETTER))
        rows: list[Row] = (
            self.rows.withColumn("row", number).where(f.col("row") <= LISTED_LETTERS).collect()
        )
        ordered = sorted(rows, key=lambda row: (row["class"], row["row"]))
        return tuple(row.asDict() for row in ordered)


class ManyMissing(NamedTuple):
    """What is missing beside the letters of a plan."""

    rows: DataFrame

    def summary(self) -> MissingSummary:
        """Return the counts of what is missing, and the first of it."""
        counts = self.rows.groupBy("what", "state").count().collect()
        order: list[Column | str] = [f.desc("what"), "table", "name"]
        first = self.rows.orderBy(*order).limit(LISTED_MISSING).collect()
        found = {(row["what"], row["state"]): row["count"] for row in counts}
        return dict(sorted(found.items())), tuple(MissingMessage(*row) for row in first)

    def write(self, path: str) -> None:
        """Write what is missing as Parquet."""
        self.rows.write.parquet(path, mode="overwrite")


def _age(now: int) -> Column:
    age = f.lit(now) - f.col("dead_at")
    return reduce(
        lambda otherwise, one: f.when(age < one[0], one[1]).otherwise(otherwise),
        reversed(AGES),
        f.lit(OLDER),
    )
