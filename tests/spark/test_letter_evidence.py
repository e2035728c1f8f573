"""The evidence of each letter, as the joins find it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from txmq.errors import ConfigError
from txmq_spark.database.mapping import (
    LARGEST_PARSED,
    Mapping,
    mistake_column,
    read_mapping,
    version_column,
)
from txmq_spark.evidence.letter_evidence import EvidenceTables, join_evidence, token_column
from txmq_spark.evidence.missing_messages import keys_apart, tokens_without_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


LETTER = (
    "`group` string, topic string, partition int, offset bigint, message_id string, key string, "
    "stored_at bigint, "
    "dead_at bigint, attempts int, error_type string, error_text string, fingerprint string, "
    "replays int, deaths int, parked bigint, reserved_by string, headers map<string,string>, "
    "body binary, damaged string"
)
LOG = "topic string, partition int, offset bigint, message_id string, key string"
RANGES = "topic string, partition bigint, lower bigint, upper bigint, `group` string"
BUSINESS = "key string, version bigint, token string, about int"
REST = (1, 2, 3, "E", "text", "f", 0, 0, 0, None)  # from stored_at on
TOKEN = "0190000000007" + "a" * 19
OTHER = "0190000000007" + "b" * 19


def letters(spark: SparkSession, *places: tuple[int, int, str | None], **fields: Any) -> DataFrame:
    """Return letters of topic t, given as partition, offset and key."""
    given = {"producer": "0" * 32, "headers": None, "body": b"", "damaged": None} | fields
    rows = [
        (
            "g",
            "t",
            partition,
            offset,
            f"{given['producer']}-{offset}",
            key,
            *REST,
            given["headers"],
            given["body"],
            given["damaged"],
        )
        for partition, offset, key in places
    ]
    version = version_column(given.get("version"))
    frame = spark.createDataFrame(rows, LETTER)
    none = f.lit(None).cast("bigint")
    return frame.withColumn("version", none if version is None else version).withColumns(
        {
            "token": token_column("message_id"),
            "about": f.lit(0),
            "mistake": mistake_column(given.get("version")),
        }
    )


def log(spark: SparkSession, *rows: tuple[int, int, str | None]) -> DataFrame:
    return spark.createDataFrame([("t", p, o, f"{'0' * 32}-{o}", key) for p, o, key in rows], LOG)


def judged(frame: DataFrame, *columns: str) -> dict[tuple[int, int], Any]:
    found = frame.collect()
    told = {(row.partition, row.offset): tuple(row[name] for name in columns) for row in found}
    assert len(told) == len(found)
    return told


def test_an_offset_is_applied_where_a_range_or_an_id_covers_it(spark: SparkSession) -> None:
    ranges = [
        ("t", 0, 0, 5, "g"),
        ("t", 0, 6, 7, "g"),
        ("t", 1, 0, 100, "g"),
        ("u", 0, 0, 100, "g"),
        ("t", 0, 0, 100, "another"),
    ]
    tables = EvidenceTables(
        applied=spark.createDataFrame(ranges, RANGES),
        applied_ids=spark.createDataFrame(
            [(f"{'0' * 32}-9",), (f"{'0' * 32}-9",)], "message_id string"
        ),
    )
    places = [
        (0, 0, None),
        (0, 4, None),
        (0, 5, None),
        (0, 6, None),
        (0, 7, None),
        (0, 9, None),
        (1, 50, None),
        (2, 1, None),
    ]
    found = judged(join_evidence(letters(spark, *places), log(spark), tables), "applied")
    assert [found[p, o] for p, o, _key in places] == [
        (x,) for x in (True, True, False, True, False, True, True, False)
    ]


def test_a_later_message_of_the_key_counts_where_it_is_applied(spark: SparkSession) -> None:
    everything = [
        (0, 1, "a"),
        (0, 2, "a"),
        (0, 3, "b"),
        (0, 4, "a"),
        (0, 5, None),
        (0, 6, None),
        (1, 9, "b"),
        (0, 7, "c"),
    ]
    dead = [(0, 1, "a"), (0, 3, "b"), (0, 5, None), (0, 7, "c")]
    applied = spark.createDataFrame(
        [
            ("t", 0, 2, 3, "g"),
            ("t", 0, 4, 5, "g"),
            ("t", 0, 6, 7, "g"),
            ("t", 1, 9, 10, "g"),
            ("t", 0, 7, 9, "another"),
        ],
        RANGES,
    )
    found = judged(
        join_evidence(
            letters(spark, *dead), log(spark, *everything), EvidenceTables(applied=applied)
        ),
        "applied",
        "later_applied",
    )
    assert found == {
        (0, 1): (False, 4),
        (0, 3): (False, None),
        (0, 5): (False, None),
        (0, 7): (False, None),
    }


def test_without_tables_there_is_no_evidence(spark: SparkSession) -> None:
    found = join_evidence(letters(spark, (0, 1, "a")), log(spark, (0, 1, "a")), EvidenceTables())
    columns = (
        "applied",
        "later_applied",
        "token_state",
        "business_row",
        "current_version",
        "version",
    )
    assert judged(found, *columns) == {(0, 1): (None,) * 6}


def test_tokens_and_business_rows_are_joined(spark: SparkSession) -> None:
    tables = EvidenceTables(
        tokens=spark.createDataFrame([(TOKEN, "C", 5)], "token string, state string, at bigint"),
        business=spark.createDataFrame(
            [("a", 3, None, 0), ("a", 4, None, 0), ("b", 1, None, 1)], BUSINESS
        ),
    )
    dead = letters(spark, (0, 1, "a"), producer=TOKEN).union(
        letters(spark, (0, 2, "b"), producer=OTHER)
    )
    dead = dead.union(letters(spark, (0, 3, None)))
    found = judged(
        join_evidence(dead, log(spark), tables),
        "token",
        "token_state",
        "business_row",
        "current_version",
    )
    assert found == {
        (0, 1): (TOKEN, "C", True, 4),
        (0, 2): (OTHER, None, False, None),
        (0, 3): (None, None, None, None),
    }


@pytest.mark.parametrize(
    ("where", "fields", "version"),
    [
        ("header:v", {"headers": {"v": "7"}}, 7),
        ("header:v", {"headers": {"w": "7"}}, None),
        ("header:v", {"headers": {"v": "seven"}}, None),
        ("header:v", {"headers": {"v": "9" * 30}}, None),
        ("json:order.v", {"body": b'{"order": {"v": 7}}'}, 7),
        ("json:order.v", {"body": b'{"order": {"v": "7"}}'}, 7),
        ("json:order.v", {"body": b"{" * 100_000}, None),
        ("json:order.v", {"body": b"\xff\xfe{}"}, None),
        ("json:order.v", {"body": b""}, None),
    ],
)
def test_a_version_is_read_from_a_header_or_the_body(
    spark: SparkSession, where: str, fields: dict[str, Any], version: int
) -> None:
    dead = letters(spark, (0, 1, "a"), version=where, **fields)
    said = None if version else "its version cannot be read"
    assert judged(dead, "version", "mistake") == {(0, 1): (version, said)}


def test_an_applied_version_is_that_of_its_message_or_a_newer_one(spark: SparkSession) -> None:
    versions = spark.createDataFrame([("a", 6), ("a", 7), ("b", 9)], "key string, version bigint")
    places = [(0, 1, "a"), (0, 2, "b"), (0, 3, "c")]
    dead = letters(spark, *places, headers={"v": "7"}, version="header:v")
    found = join_evidence(dead, log(spark), EvidenceTables(applied_versions=versions))
    assert judged(found, "applied", "current_version") == {
        (0, 1): (True, 7),
        (0, 2): (None, 9),
        (0, 3): (None, None),
    }


def test_rows_whose_messages_are_not_in_the_log_are_found(spark: SparkSession) -> None:
    tokens = [(TOKEN, "C", 5), (OTHER, "D", 6), (TOKEN.replace("a", "c"), "R", 7)]
    known = spark.createDataFrame(tokens, "token string, state string, at bigint")
    seen = spark.createDataFrame(
        [("t", 0, 0, f"{TOKEN}-0", "a"), ("t", 0, 1, f"{'0' * 32}-1", "b")], LOG
    )
    assert [tuple(row) for row in tokens_without_messages(known, seen).collect()] == [(OTHER, 6)]
    rows = [("a", 1, None, 0), ("c", 1, None, 0), ("b", 1, None, 1), (None, 1, None, 0)]
    business = spark.createDataFrame(rows, BUSINESS)
    log = seen.withColumn("about", f.lit(0))

    def apart(*partly: int) -> list[tuple[int, str, int]]:
        found = keys_apart(business, log, partly).collect()
        return sorted((row["about"], row["key"], row["told"]) for row in found)

    assert apart() == [(0, "b", 1), (0, "c", 0), (1, "b", 0)]
    assert apart(0) == [(0, "b", 1), (1, "b", 0)]
    assert apart(0, 1) == [(0, "b", 1)]


def test_damaged_and_huge_letters_have_a_reason_of_their_own(spark: SparkSession) -> None:
    huge = letters(spark, (0, 1, "a"), version="json:v", body=b" " * (LARGEST_PARSED + 1))
    assert judged(huge, "version", "mistake") == {
        (0, 1): (None, "its body of 1048577 bytes is too large to be searched")
    }
    damaged = letters(spark, (0, 1, None), body=None, damaged="bad checksum")
    assert judged(damaged, "mistake") == {(0, 1): ("its message is damaged: bad checksum",)}


def test_each_topic_is_about_the_table_that_names_it(spark: SparkSession) -> None:
    mapping = Mapping.model_validate(
        {
            "table": [
                {"name": "orders", "key": "id", "topics": ["o", "o2"]},
                {"name": "rest", "key": "id"},
                {"name": "refunds", "key": "id", "topics": ["r"]},
            ]
        }
    )
    topics = spark.createDataFrame([("o",), ("o2",), ("r",), ("x",)], "topic string")
    found = topics.withColumn("about", mapping.about()).collect()
    assert {row["topic"]: row["about"] for row in found} == {"o": 0, "o2": 0, "x": 1, "r": 2}
    [none] = topics.limit(1).select(Mapping().about().alias("about")).collect()
    assert none["about"] is None


def test_tables_of_topics_that_are_not_read_are_left_out() -> None:
    tables = {"orders": ["o", "o2"], "rest": [], "refunds": ["r"]}
    mapping = Mapping.model_validate(
        {"table": [{"name": name, "key": "id", "topics": of} for name, of in tables.items()]}
    )
    for read, left, partly in (
        (("o", "o2", "r"), ["orders", "rest", "refunds"], []),
        (("o", "x"), ["orders", "rest"], [0]),
        (("r",), ["rest", "refunds"], []),
    ):
        there = mapping.of_topics(read)
        assert [table.name for table in there.tables] == left
        assert there.partly_read(read) == partly


@pytest.mark.parametrize("where", ["v", "header:", "body:v", "json"])
def test_an_invalid_source_of_the_version_is_refused(spark: SparkSession, where: str) -> None:
    with pytest.raises(ConfigError, match="header:NAME"):
        version_column(where)


def test_a_mapping_with_a_version_is_read_before_there_is_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command does."""
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    path = tmp_path / "shop.toml"
    path.write_text('version = "header:version"', "utf-8")
    assert read_mapping(path).version == "header:version"
    path.write_text('version = "body:version"', "utf-8")
    with pytest.raises(ConfigError, match="header:NAME"):
        read_mapping(path)
    deep = tmp_path / "shop.json"
    deep.write_text("[" * 100_000, "utf-8")
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_mapping(deep)


def test_an_invalid_path_fails_or_finds_no_version(spark: SparkSession) -> None:
    found = letters(spark, (0, 1, "a"), body=b"{}", version="json:[[")
    try:
        assert judged(found, "version") == {(0, 1): (None,)}
    except PySparkException as error:
        assert "PATH" in str(error).upper()  # noqa: PT017  # Spark may refuse such a path or find nothing there
