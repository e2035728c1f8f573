"""Parts of a plan's letters: ranges of places, each with a digest of its own.

Parts are cut by the places alone. So however many tasks write them, the same letters
are the same parts, and each is sorted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Annotated, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from txmq.wire.json import WireModel
from txmq_spark.evidence.letter_evidence import LETTER

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


class PlanPart(WireModel):
    """A part: the number of its letters, and the digest of their lines of JSON."""

    letters: Count
    sha256: str


class PlacedLetters(NamedTuple):
    """Letters with column `part`, in parts from 0 to `parts` - 1."""

    frame: DataFrame
    parts: int


def in_parts(letters: DataFrame) -> PlacedLetters:
    """Assign letters to parts, by their places alone."""
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
    line = f.concat(f.to_json(f.struct(*COLUMNS), {"ignoreNullFields": "false"}), f.lit("\n"))
    lines = letters.select("part", line.alias("line"))
    found = lines.mapInArrow(_digested, "part int, letters bigint, sha256 string").collect()
    return tuple(
        PlanPart(letters=row["letters"], sha256=row["sha256"])
        for row in sorted(found, key=lambda row: row["part"])
    )


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
