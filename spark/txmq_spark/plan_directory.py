"""A plan as a directory: its letters as Parquet, a manifest, and what is missing.

    plan.json    the manifest; it is written last, so a directory without it is no plan
    made.json    when and under which snapshot it was made
    letters/     the letters with their classes and evidence, in parts
    missing/     rows without messages, and messages without rows
    outcomes/    what became of the letters, once `replay` has run

A part is a range of places, cut by the places alone. So however many tasks write them,
the same letters are the same parts, and each is sorted. The digest covers the manifest,
which has a digest of each part; no time is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from math import inf
from typing import Annotated, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pydantic import Field
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from txmq.errors import ConfigError, RemoteProtocolError
from txmq.wire.json import WireModel, parse_as
from txmq_spark.concurrent_actions import at_once
from txmq_spark.hadoop_files import Directory
from txmq_spark.letter_evidence import LETTER
from txmq_spark.plan import LetterClass, PlanRules
from txmq_spark.query_errors import cause_of

VERSION: Final = 2
HINT: Final = "do not edit a plan: run reconcile again for another one"
MANIFEST, MADE, LETTERS, MISSING = "plan.json", "made.json", "letters", "missing"
OUTCOMES: Final = "outcomes"
OURS: Final = frozenset({MANIFEST, MADE, LETTERS, MISSING, OUTCOMES})
LARGEST_MANIFEST: Final = 64 << 20
PART_LETTERS: Final = 100_000  # of one part, about
BUCKETS: Final = 20_000  # of which parts are made

Count = Annotated[int, Field(ge=0)]
COLUMNS: Final = {
    "group": "string",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "number": "bigint",
    "message_id": "string",
    "key": "string",
    "class": "string",
    "reason": "string",
    "replay": "boolean",
    "stored_at": "bigint",
    "dead_at": "bigint",
    "attempts": "int",
    "replays": "int",
    "deaths": "int",
    "parked": "bigint",
    "error_type": "string",
    "error": "string",
    "fingerprint": "string",
    "reserved": "boolean",
    "applied": "boolean",
    "later_applied": "bigint",
    "token": "string",
    "token_state": "string",
    "business_row": "boolean",
    "version": "bigint",
    "current_version": "bigint",
}
SCHEMA: Final = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())


class PlanFilters(WireModel):
    """The rules that the plan was made with."""

    include: tuple[LetterClass, ...]
    replays: int
    deaths: int
    error_types: tuple[str, ...]
    fingerprints: tuple[str, ...]

    @classmethod
    def of(cls, rules: PlanRules) -> PlanFilters:
        return cls(
            include=tuple(sorted(rules.include)),
            replays=rules.replays,
            deaths=rules.deaths,
            error_types=tuple(sorted(rules.error_types)),
            fingerprints=tuple(sorted(rules.fingerprints)),
        )


class PlanInputs(WireModel):
    """The state that the plan was made from: messages up to `ends` were classified."""

    groups: tuple[str, ...]
    log_id: str
    firsts: dict[str, tuple[Count, ...]]  # retention has left these, by topic and partition
    ends: dict[str, tuple[Count, ...]]
    evidence: tuple[str, ...] = ()  # the tables that were read
    database: str | None = None  # its system identifier and name; None without a database
    incarnation: str = ""  # of the log; "" = it was never restored


class PlanPart(WireModel):
    """A part of the letters."""

    letters: Count
    sha256: str


class PlanManifest(WireModel):
    """All about a plan but its letters, of which it has counts by group and class."""

    txmq_plan: int = VERSION
    facts: PlanInputs
    filters: PlanFilters
    letters: dict[str, dict[LetterClass, Count]]
    replays: dict[str, Count]  # by group
    parts: tuple[PlanPart, ...]
    digest: str = ""

    def sealed(self) -> PlanManifest:
        """Return the manifest with its digest."""
        return self.model_copy(update={"digest": sha256(self._text().encode()).hexdigest()})

    def text(self) -> str:
        """Return the bytes of its file, the same for the same plan."""
        tree = self.model_dump(mode="json")
        if not self.facts.incarnation:  # as in plans of before it was a fact
            del tree["facts"]["incarnation"]
        return json.dumps(tree, sort_keys=True, indent=1) + "\n"

    def _text(self) -> str:
        return self.model_copy(update={"digest": ""}).text()

    @property
    def is_sealed(self) -> bool:
        return self.digest == self.sealed().digest


class PlanMade(WireModel):
    """When a plan was made: by the database's clock, under which snapshot."""

    snapshot: str | None = None  # as pg_current_snapshot() prints it
    snapshot_at: int | None = None  # microseconds


class StoredPlan(NamedTuple):
    """A plan in its directory."""

    path: str
    manifest: PlanManifest
    letters: DataFrame


class Rows(Protocol):
    """Rows of a plan: in executors (`many_letters`), or in the driver where they are
    few (`few_letters`).
    """

    def write(self, path: str) -> None:
        """Write the rows as Parquet files into a directory."""


class PlanRows(NamedTuple):
    """Letters of a plan, and what is missing beside them."""

    letters: Rows
    missing: Rows


class PlacedLetters(NamedTuple):
    """Letters with column `part`, in parts from 0 to `parts` - 1."""

    frame: DataFrame
    parts: int


def in_parts(letters: DataFrame, most: float = inf) -> PlacedLetters:
    """Assign letters to parts, by their places alone. There are no more than `most`."""
    if most <= PART_LETTERS:
        return PlacedLetters(letters.withColumn("part", f.lit(0)), 1)
    by = LETTER[:3]
    ranges = (
        letters.groupBy(*by)
        .agg(f.count("*").alias("n"), f.min("offset").alias("low"), f.max("offset").alias("high"))
        .collect()
    )
    if sum(row["n"] for row in ranges) <= PART_LETTERS:
        return PlacedLetters(letters.withColumn("part", f.lit(0)), 1)
    width = max(1, sum(row["high"] - row["low"] + 1 for row in ranges) // BUCKETS)
    bucket = f.floor(f.col("offset") / width).alias("bucket")
    counted = letters.groupBy(*by, bucket).count().orderBy(*by, "bucket").toArrow()
    parts = _parts_of(counted.column("count").to_pylist())
    known = counted.drop_columns("count").append_column("part", pa.array(parts, pa.int32()))
    # Arrow, because Spark would start Python workers for a list of rows.
    buckets = letters.sparkSession.createDataFrame(known)
    placed = letters.withColumn("bucket", bucket).join(f.broadcast(buckets), [*by, "bucket"])
    return PlacedLetters(placed.drop("bucket"), parts[-1] + 1)


def _parts_of(counts: Sequence[int]) -> list[int]:
    """Return the part of each bucket, given the letters in each."""
    parts: list[int] = []
    part = filled = 0
    for letters in counts:
        if filled and filled + letters > PART_LETTERS:
            part, filled = part + 1, 0
        filled += letters
        parts.append(part)
    return parts


def arranged(letters: DataFrame, parts: int) -> DataFrame:
    """Return the columns of a plan, part by part, each sorted."""
    whole = whole_parts(letters.select("part", *COLUMNS), parts)
    return whole.sortWithinPartitions("part", *LETTER)


def whole_parts(letters: DataFrame, parts: int) -> DataFrame:
    """Return letters so that each part is in one task."""
    return letters.repartition(parts, "part") if parts > 1 else letters.coalesce(1)


def part_digests(letters: DataFrame) -> tuple[PlanPart, ...]:
    """Return the digests of all parts: SHA-256 over the letters as lines of JSON."""
    lines = letters.select("part", line_column().alias("line"))
    found = lines.mapInArrow(_digested, "part int, letters bigint, sha256 string").collect()
    return tuple(
        PlanPart(letters=row["letters"], sha256=row["sha256"])
        for row in sorted(found, key=lambda row: row["part"])
    )


def line_column() -> Column:
    """Return the line of a letter in the digest of its part."""
    return f.concat(f.to_json(f.struct(*COLUMNS), {"ignoreNullFields": "false"}), f.lit("\n"))


def _digested(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the digest of each part, of which each task has whole ones in order."""
    current: int | None = None
    digest, letters = sha256(), 0
    for batch in batches:
        for part, lines in _runs(batch):
            if current not in (None, part):
                yield _digest_row(current, letters, digest.hexdigest())
                digest, letters = sha256(), 0
            current = part
            digest.update("".join(lines).encode())
            letters += len(lines)
    if current is not None:
        yield _digest_row(current, letters, digest.hexdigest())


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, list[str]]]:
    lines = batch.column("line").to_pylist()
    start = 0
    ends = pc.run_end_encode(batch.column("part"))
    for part, end in zip(ends.values.to_pylist(), ends.run_ends.to_pylist(), strict=True):
        yield part, lines[start:end]
        start = end


def _digest_row(part: int | None, letters: int, digest: str) -> pa.RecordBatch:
    columns = {
        "part": pa.array([part], pa.int32()),
        "letters": pa.array([letters], pa.int64()),
        "sha256": pa.array([digest], pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns)


def write_plan(
    spark: SparkSession, path: str, manifest: PlanManifest, made: PlanMade, rows: PlanRows
) -> StoredPlan:
    """Write a plan; one that is there is replaced.

    Raises ConfigError where the directory has anything else.
    """
    directory = plan_place(spark, path)
    for name in sorted(OURS, reverse=True):  # the manifest before what it stands for
        directory.remove(name)
    at_once(
        spark,
        lambda: rows.letters.write(f"{directory.path}/{LETTERS}"),
        lambda: rows.missing.write(f"{directory.path}/{MISSING}"),
    )
    directory.write(MADE, f"{made.model_dump_json()}\n".encode())
    directory.write(MANIFEST, manifest.text().encode())
    return StoredPlan(directory.path, manifest, _stored(spark, directory.path))


def plan_place(spark: SparkSession, path: str) -> Directory:
    """Return a directory that a plan may be written to.

    Raises ConfigError where it has anything else, or no file system takes the path.
    """
    directory = Directory(spark, path)
    foreign = _foreign(spark, directory)
    if foreign:
        raise ConfigError(
            "plan", f"{path} has {foreign[0]}, which is of no plan", hint="name a new directory"
        )
    return directory


def _foreign(spark: SparkSession, directory: Directory) -> list[str]:
    """Return the names in a directory that are neither of a plan, nor of what a killed
    job has left of one.
    """
    names = directory.names()
    below = [
        f"{name}/{one}"
        for name in (LETTERS, MISSING, OUTCOMES)
        if name in names
        for one in Directory(spark, f"{directory.path}/{name}").names()
        if not one.startswith(("part=", "part-", "_", "."))
    ]
    return [name for name in names if name not in OURS and name[0] not in "._"] + below


def _stored(spark: SparkSession, path: str) -> DataFrame:
    return spark.read.schema(f"{SCHEMA}, part int").parquet(f"{path}/{LETTERS}")


def read_plan(spark: SparkSession, path: str) -> StoredPlan:
    """Return the plan of a directory; its letters are compared with its digest.

    Raises ConfigError where there is no plan, or one that was changed.
    """
    directory = Directory(spark, path)
    try:
        text = directory.read(MANIFEST, LARGEST_MANIFEST)
        if text is None:
            raise ConfigError(
                "plan", f"{path} has no {MANIFEST}", hint="name a directory that reconcile wrote"
            )
        manifest = parse_as(PlanManifest, text.encode())
    except (RemoteProtocolError, ValueError) as error:
        raise ConfigError("plan", f"{path}/{MANIFEST}: {error}", hint=HINT) from error
    if manifest.txmq_plan != VERSION:
        raise ConfigError(
            "plan",
            f"version {manifest.txmq_plan} is not supported, only version {VERSION}",
            hint="run reconcile again",
        )
    stored = _stored(spark, directory.path)
    letters = arranged(stored, max(1, len(manifest.parts)))
    try:
        same = manifest.is_sealed and part_digests(letters) == manifest.parts
    except (PySparkException, Py4JJavaError) as error:  # Spark does not translate all
        reason = cause_of(error)[:1_000]
        raise ConfigError("plan", f"its letters cannot be read: {reason}", hint=HINT) from error
    if not same:
        raise ConfigError("plan", "it was changed after it was made", hint=HINT)
    return StoredPlan(directory.path, manifest, stored)
