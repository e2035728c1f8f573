"""Plans in directories: the same bytes for the same letters, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from tests.spark.letters import Letter, letter, letter_frame
from tests.spark.plans import planned
from txmq.errors import ConfigError
from txmq.wire.json import parse_as
from txmq_spark.plan import directory as plan_directory
from txmq_spark.plan import parts as plan_parts
from txmq_spark.plan.directory import (
    LETTERS,
    MANIFEST,
    PlanFilters,
    PlanInputs,
    PlanManifest,
    read_plan,
)
from txmq_spark.plan.rules import PlanRules
from txmq_spark.session.hadoop_files import Directory
from txmq_spark.session.query_errors import JobFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def letters() -> list[Letter]:
    """Letters of several parts, some with keys that are hard to write."""
    chance = Random(1)
    keys = [None, "", "a", "ключ💥", 'say "hi"', "two\nlines", "\u2028", "\\N", "\0"]
    return [
        letter(
            chance.randrange(100) + 100 * at,
            chance.choice(keys),
            partition=at % 3,
            group=f"g{at % 2}",
            parked=at % 2,
        )
        for at in range(30)
    ]


def files(path: Path) -> dict[str, bytes]:
    """Return the Parquet files by their directories, each of which has one."""
    found = {one.parent.name: one.read_bytes() for one in path.rglob("part=*/*.parquet")}
    assert len(found) == len(list(path.rglob("part=*/*.parquet")))
    return found


def test_the_same_letters_are_the_same_bytes_in_any_order_and_partitions(
    spark: SparkSession, tmp_path: Path, letters: list[Letter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_parts, "PART_LETTERS", 10)
    monkeypatch.setattr(plan_parts, "BUCKETS", 40)
    one = planned(tmp_path / "one", letter_frame(spark, letters).coalesce(1))
    shuffled = Random(2).sample(letters, len(letters))
    planned(tmp_path / "other", letter_frame(spark, shuffled).repartition(3))
    assert len(one.manifest.parts) > 2
    assert sum(part.letters for part in one.manifest.parts) == len(letters)
    texts = [(tmp_path / name / MANIFEST).read_bytes() for name in ("one", "other")]
    assert texts[0] == texts[1]
    assert files(tmp_path / "one") == files(tmp_path / "other")
    back = read_plan(spark, str(tmp_path / "one"))
    assert back.manifest == one.manifest
    assert sorted(row["offset"] for row in back.letters.collect()) == sorted(
        one["offset"] for one in letters
    )


def test_a_plan_that_was_changed_is_refused(
    spark: SparkSession, tmp_path: Path, letters: list[Letter]
) -> None:
    path = tmp_path / "plan"
    planned(path, letter_frame(spark, letters))
    manifest = json.loads((path / MANIFEST).read_text())
    whole = spark.read.parquet(str(path / LETTERS)).cache()
    assert whole.count() == len(letters)
    frames = {
        "a letter is gone": whole.where("offset > 100"),
        "a column is renamed": whole.withColumnRenamed("number", "numero"),
        "a column is of another type": whole.withColumn("number", whole["number"].cast("string")),
        "a letter is another": whole.withColumn("offset", whole["offset"] + 1),
    }
    for what, frame in frames.items():
        frame.coalesce(1).write.parquet(f"{path}/changed", mode="overwrite")
        (path / LETTERS).rename(path / "before")
        (path / "changed").rename(path / LETTERS)
        refused(spark, path, r"it was changed|cannot be read", what)
        (path / LETTERS).rename(path / "changed")
        (path / "before").rename(path / LETTERS)
    whole.unpersist()
    [written, *_others] = sorted((path / LETTERS).glob("part=*/part-*.parquet"))
    bytes_written = written.read_bytes()
    written.with_name(f".{written.name}.crc").unlink()
    written.write_bytes(bytes_written[:-9])
    refused(spark, path, r"cannot be read: .*caused by .*not a Parquet file", "cut")
    written.write_bytes(bytes_written)
    texts = {
        "it was changed": json.dumps(manifest | {"replays": {"g0": 1}}),
        "version 3 is not supported": json.dumps(manifest | {"txmq_plan": 3}),
        "invalid JSON": "{",
        "bytes, and": " " * 2_000,
    }
    (path / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="Checksum error"):
        read_plan(spark, str(path))
    for says, text in texts.items():
        Directory(spark, str(path)).write(MANIFEST, text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan_directory, "LARGEST_MANIFEST", 1_900)
            refused(spark, path, says)


def refused(spark: SparkSession, path: Path, says: str, what: str = "") -> None:
    with pytest.raises(ConfigError, match=says):
        pytest.fail(f"{read_plan(spark, str(path))} was read: {what}")


def test_the_incarnation_of_a_log_is_in_the_digest_of_a_plan() -> None:
    facts = PlanInputs(groups=("g",), log_id="l", firsts={}, ends={})
    plan = PlanManifest(
        facts=facts, filters=PlanFilters.of(PlanRules()), letters={}, replays={}, parts=()
    )
    restored = plan.model_copy(update={"facts": facts.model_copy(update={"incarnation": "i"})})
    for one in (plan.sealed(), restored.sealed()):
        assert parse_as(PlanManifest, one.text().encode()) == one
        assert one.is_sealed
    assert plan.sealed().digest != restored.sealed().digest


@pytest.mark.parametrize("path", ["", "nowhere://plan", "s3a://bucket/plan"])
def test_a_path_that_no_file_system_takes_is_refused(spark: SparkSession, path: str) -> None:
    with pytest.raises(ConfigError, match="it cannot be used"):
        read_plan(spark, path)


@pytest.mark.parametrize("path", ["file:///etc", "/nowhere/at/all", "file:///etc/hostname"])
def test_a_path_without_a_plan_is_refused(spark: SparkSession, path: str) -> None:
    with pytest.raises(ConfigError, match=r"has no plan\.json"):
        read_plan(spark, path)


def test_a_directory_with_other_files_is_left_alone(
    spark: SparkSession, tmp_path: Path, letters: list[Letter]
) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"photo\.jpg, which is of no plan"):
        planned(tmp_path, letter_frame(spark, letters))
    (tmp_path / "photo.jpg").rename(tmp_path / "letters" / "of-ada.txt")
    with pytest.raises(ConfigError, match=r"letters/of-ada\.txt, which is of no plan"):
        planned(tmp_path, letter_frame(spark, letters))
    assert [one.name for one in tmp_path.rglob("*")] == ["letters", "of-ada.txt"]


def test_a_rename_that_is_refused_is_an_error(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(spark, str(tmp_path))
    files = Mock(wraps=directory._files)  # no file system here does so
    files.rename = Mock(return_value=False)
    monkeypatch.setattr(directory, "_files", files)
    with pytest.raises(JobFailed, match=r"renamed to plan\.json"):
        directory.write(MANIFEST, "{}")
    assert MANIFEST not in directory.names()
