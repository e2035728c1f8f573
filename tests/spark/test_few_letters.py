"""Letters that the driver counts, beside the same that executors count."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from tests.spark.letters import Letter, letter, letter_frame
from tests.spark.plans import planned
from txmq.model.units import HOUR
from txmq_spark.evidence.missing_messages import MISSING
from txmq_spark.plan.directory import LETTERS, PlanMade, PlanRows, read_plan, write_plan
from txmq_spark.plan.few_letters import FewLetters, FewMissing
from txmq_spark.plan.many_letters import ManyLetters, ManyMissing
from txmq_spark.plan.parts import arranged, in_parts
from txmq_spark.plan.rules import PlanRules, classified
from txmq_spark.plan.summary import MissingMessage, MissingSummary
from txmq_spark.session.kept_frames import KeptFrames

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

NOW = 100 * 24 * HOUR
ONE_MISSING: MissingSummary = (
    {("row", "missing"): 1},
    (MissingMessage("row", "orders", "k", "missing", None),),
)
# The order of UTF-8 is that of code points, and not that of Java's UTF-16.
TEXTS = (None, "", "E", "Z", "a", "é", "日", "\uffee", "\U0001f600", 'say "\\"\u2028\x01')


def varied(chance: Random, count: int) -> list[Letter]:
    """Return letters of several groups, topics, keys, errors, classes and ages."""

    def one(offset: int) -> Letter:
        fields: dict[str, Any] = {
            "group": chance.choice(["billing", "mail"]),
            "topic": chance.choice(["orders", "refunds"]),
            "partition": chance.randrange(3),
            "dead_at": NOW - chance.randrange(10 * 24 * HOUR),
            "error": chance.choice(TEXTS),
            "error_type": chance.choice(TEXTS),
            "fingerprint": chance.choice(TEXTS),
            "replays": chance.randrange(4),
            "applied": chance.choice([None, False, True]),
            "parked": chance.randrange(2),
        }
        key = chance.choice([None, *(f"k{n}" for n in range(150)), "é", "\U0001f600"])
        return letter(offset, key, **fields)

    return [one(offset) for offset in chance.sample(range(10 * count), count)]


def plan_frame(letters: DataFrame) -> DataFrame:
    """Return letters with their classes, in the parts of a plan."""
    placed = in_parts(letters)
    return arranged(classified(placed.frame, PlanRules()), placed.parts)


@pytest.mark.parametrize("count", [0, 1, 600])
def test_few_letters_have_the_digests_and_the_summary_of_many(
    spark: SparkSession, count: int
) -> None:
    letters = varied(Random(count), count)
    with KeptFrames() as kept:
        plan = kept.keep(plan_frame(letter_frame(spark, letters)))
        few, many = FewLetters.of(plan), ManyLetters(plan)
        assert few.part_digests() == many.part_digests()
        assert few.summary(ONE_MISSING, NOW) == many.summary(ONE_MISSING, NOW)
        youngest = max((one["dead_at"] for one in letters), default=0)
        assert (few.youngest(), many.youngest()) == (youngest, youngest)


def test_counts_that_fail_leave_no_frame_behind(spark: SparkSession) -> None:
    cached: Any = spark._jsparkSession.sharedState().cacheManager().numCachedEntries
    before = cached()
    columns = ("'g' AS `group`", "'t' AS topic", "'k' AS key", "id = 0 AS replay")
    rows = spark.range(1).selectExpr(*columns, "bigint(raise_error('lost')) AS dead_at")
    with pytest.raises(PySparkException, match="lost"):
        ManyLetters(rows)._keys()
    assert cached() == before


def test_each_part_of_few_letters_has_its_digest(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq_spark.plan.parts.PART_LETTERS", 40)
    plan = plan_frame(letter_frame(spark, varied(Random(7), 200)))
    digests = FewLetters.of(plan).part_digests()
    assert len(digests) > 2
    assert digests == ManyLetters(plan).part_digests()


@pytest.mark.parametrize("count", [0, 1, 300])
def test_what_is_missing_is_counted_and_listed_alike(spark: SparkSession, count: int) -> None:
    chance = Random(count)
    rows = [
        (
            chance.choice(["row", "key", "transaction"]),
            chance.choice([None, "orders", "refunds"]),
            f"{chance.choice(TEXTS)} {number}",
            chance.choice(["missing", "removed?"]),
            chance.choice([None, NOW]),
        )
        for number in range(count)
    ]
    missing = spark.createDataFrame(rows, MISSING)
    assert FewMissing.of(missing).summary() == ManyMissing(missing).summary()


@pytest.mark.parametrize("count", [0, 120])
def test_a_plan_that_the_driver_writes_is_that_of_executors(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("txmq_spark.plan.parts.PART_LETTERS", 40)
    letters = letter_frame(spark, varied(Random(count), count))
    by_executors = planned(tmp_path / "executors", letters)
    missing = spark.createDataFrame([("row", None, "é", "missing", None)], MISSING)
    rows = PlanRows(FewLetters.of(plan_frame(letters)), FewMissing.of(missing))
    path = str(tmp_path / "driver")
    write_plan(spark, path, by_executors.manifest, PlanMade(), rows)
    by_driver = read_plan(spark, path)
    assert by_driver.letters.schema == by_executors.letters.schema
    assert {*by_driver.letters.collect()} == {*by_executors.letters.collect()}
    theirs, ours = (
        sorted(one.name for one in (tmp_path / name / LETTERS).glob("part=*"))
        for name in ("executors", "driver")
    )
    assert ours == theirs
    kept = spark.read.parquet(f"{path}/missing")
    assert (kept.schema, kept.collect()) == (missing.schema, missing.collect())
