"""Letters that the driver counts, beside the same that executors count."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.letters import Letter, letter, letter_frame
from tests.spark.plans import planned
from txmq.model.units import HOUR
from txmq_spark.few_letters import FewLetters, few_missing
from txmq_spark.plan import PlanRules, classified
from txmq_spark.plan_directory import (
    LETTERS,
    PlanMade,
    PlanRows,
    arranged,
    in_parts,
    part_digests,
    read_plan,
    write_plan,
)
from txmq_spark.plan_summary import (
    MissingMessage,
    MissingSummary,
    summarize,
    summarize_missing,
)
from txmq_spark.reconcile import MISSING

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # includes the start of a JVM on a loaded machine
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


@pytest.mark.parametrize("count", [0, 1, 600])
def test_few_letters_have_the_digests_and_the_summary_of_many(
    spark: SparkSession, count: int
) -> None:
    placed = in_parts(letter_frame(spark, varied(Random(count), count)))
    plan = arranged(classified(placed.frame, PlanRules()), placed.parts)
    few = FewLetters.of(plan)
    assert few.part_digests() == part_digests(plan)
    assert few.summary(ONE_MISSING, NOW) == summarize(plan, ONE_MISSING, NOW)
    assert few.youngest == (plan.agg({"dead_at": "max"}).collect()[0][0] or 0)
    plan.unpersist()


def test_each_part_of_few_letters_has_its_digest(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq_spark.plan_directory.PART_LETTERS", 40)
    placed = in_parts(letter_frame(spark, varied(Random(7), 200)))
    plan = arranged(classified(placed.frame, PlanRules()), placed.parts)
    assert placed.parts > 2
    assert FewLetters.of(plan).part_digests() == part_digests(plan)
    plan.unpersist()


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
    assert few_missing(missing.toArrow()) == summarize_missing(missing)


@pytest.mark.parametrize("count", [0, 120])
def test_a_plan_that_the_driver_writes_is_that_of_executors(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("txmq_spark.plan_directory.PART_LETTERS", 40)
    letters = letter_frame(spark, varied(Random(count), count))
    by_executors = planned(tmp_path / "executors", letters)
    placed = in_parts(letters)
    plan = arranged(classified(placed.frame, PlanRules()), placed.parts)
    missing = spark.createDataFrame([("row", None, "é", "missing", None)], MISSING)
    rows = PlanRows(FewLetters.of(plan).rows, missing.toArrow())
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
    plan.unpersist()
