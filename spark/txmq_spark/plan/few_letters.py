"""Few letters of a plan and what is missing beside them, in the driver: it counts and
writes them.

`many_letters` has the same results for any number of letters, by eleven jobs. With a
thousand letters, Spark plans these for longer than it counts. Here it is a job for the
letters, and one for what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from txmq_spark.evidence.letter_evidence import LETTER
from txmq_spark.plan.parts import PlanPart, line_column
from txmq_spark.plan.summary import (
    LISTED_LETTERS,
    LISTED_MISSING,
    TOP_FAILURES,
    TOP_KEYS,
    Concentration,
    Failure,
    KeyCount,
    LetterCount,
    MissingMessage,
    MissingSummary,
    PlanSummary,
    age_of,
    summary_of,
)
from txmq_spark.session.hadoop_files import Directory
from txmq_spark.session.task_frames import gathered

LINE: Final = "line"

Letter = Mapping[str, Any]  # by the names of a plan's columns


class FewLetters:
    """The letters of a plan, in its order."""

    def __init__(self, spark: SparkSession, table: pa.Table) -> None:
        self._spark, self._rows = spark, table.drop_columns(LINE)
        self._letters: Sequence[Letter] = table.to_pylist()

    @classmethod
    def of(cls, letters: DataFrame) -> Self:
        """Read the letters of a plan, each part of which is sorted."""
        lines = letters.withColumn(LINE, line_column())
        return cls(letters.sparkSession, lines.toArrow())

    def youngest(self) -> int:
        """Return the time of the last death in microseconds; 0 = there are no
        letters.
        """
        return max((letter["dead_at"] for letter in self._letters), default=0)

    def part_digests(self) -> tuple[PlanPart, ...]:
        """Return the digests of all parts."""
        # Each part is in one task, and tasks are in no order.
        lines = {
            part: [letter[LINE] for letter in letters]
            for part, letters in groupby(self._letters, itemgetter("part"))
        }
        return tuple(
            PlanPart(letters=len(some), sha256=sha256("".join(some).encode()).hexdigest())
            for _part, some in sorted(lines.items())
        )

    def summary(self, missing: MissingSummary, now: int) -> PlanSummary:
        """Return the summary; `missing` is what is missing beside the letters, and
        `now` the time of ages.
        """
        counts = Counter(
            (one["group"], one["class"], one["replay"], age_of(now - one["dead_at"]))
            for one in self._letters
        )
        return summary_of(
            [LetterCount(*kind, count) for kind, count in counts.items()],
            self._failures(),
            self._keys(),
            self._samples(),
            missing,
            now,
        )

    def write(self, path: str) -> None:
        """Write the letters as Parquet, with a directory for each part."""
        parts = self._rows.column("part")
        for part in sorted(set(parts.to_pylist())):
            of_part = self._rows.filter(pc.equal(parts, part))
            _write_table(self._spark, of_part.drop_columns("part"), f"{path}/part={part}")
        # as Spark does; so the directory exists without letters, too
        Directory(self._spark, path).write("_SUCCESS", b"")

    def _failures(self) -> tuple[tuple[Failure, ...], tuple[int, int]]:
        groups = _grouped(self._letters, ("error_type", "fingerprint"))
        # Null comes first, and texts are in the order of their UTF-8, as in Spark.
        order = sorted(groups, key=lambda kind: (-len(groups[kind]), *map(_null_first, kind)))
        top = tuple(
            Failure(kind[0] or "", kind[1] or "", _least_error(groups[kind]), len(groups[kind]))
            for kind in order[:TOP_FAILURES]
        )
        others = len(self._letters) - sum(one.letters for one in top)
        return top, (len(groups) - len(top), others)

    def _keys(self) -> Concentration:
        keyed = [letter for letter in self._letters if letter["key"] is not None]
        counted = [
            KeyCount(
                *(group, topic, key, len(letters)),
                replayed=sum(letter["replay"] for letter in letters),
                oldest=min(letter["dead_at"] for letter in letters),
            )
            for (group, topic, key), letters in _grouped(keyed, ("group", "topic", "key")).items()
        ]
        counted.sort(key=lambda one: (-one.letters, one.group, one.topic, one.key))
        return Concentration(len(counted), len(keyed), tuple(counted[:TOP_KEYS]))

    def _samples(self) -> tuple[dict[str, Any], ...]:
        by_class = _grouped(sorted(self._letters, key=itemgetter(*LETTER)), ("class",))
        return tuple(
            {name: value for name, value in letter.items() if name != LINE} | {"row": number}
            for _class, letters in sorted(by_class.items())
            for number, letter in enumerate(letters[:LISTED_LETTERS], 1)
        )


class FewMissing:
    """What is missing beside the letters of a plan."""

    def __init__(self, spark: SparkSession, rows: pa.Table) -> None:
        self._spark, self._rows = spark, rows

    @classmethod
    def of(cls, missing: DataFrame) -> Self:
        """Read what is missing, by one task."""
        return cls(missing.sparkSession, gathered(missing, few=True).toArrow())

    def summary(self) -> MissingSummary:
        """Return the counts of what is missing, and the first of it."""
        kinds = self._rows.group_by(["what", "state"]).aggregate([([], "count_all")])
        counts = {(one["what"], one["state"]): one["count_all"] for one in kinds.to_pylist()}
        # null comes first
        named = self._rows.append_column("named", pc.is_valid(self._rows.column("table")))
        order = [("what", "descending")]
        order += [(name, "ascending") for name in ("named", "table", "name")]
        first = self._rows.take(pc.sort_indices(named, order)[:LISTED_MISSING])
        listed = tuple(MissingMessage(**one) for one in first.to_pylist())
        return dict(sorted(counts.items())), listed

    def write(self, path: str) -> None:
        """Write what is missing as Parquet."""
        _write_table(self._spark, self._rows, path)


def _write_table(spark: SparkSession, rows: pa.Table, path: str) -> None:
    """Write a file as a task of Spark would: for few rows, its job takes longer."""
    file = pa.BufferOutputStream()
    pq.write_table(rows, file, compression="snappy", store_schema=False)
    Directory(spark, path).write("part-00000.snappy.parquet", file.getvalue().to_pybytes())


def _grouped(
    letters: Iterable[Letter], names: Sequence[str]
) -> dict[tuple[Any, ...], list[Letter]]:
    groups: dict[tuple[Any, ...], list[Letter]] = {}
    for letter in letters:
        groups.setdefault(tuple(letter[name] for name in names), []).append(letter)
    return groups


def _null_first(text: str | None) -> tuple[bool, str]:
    return text is not None, text or ""


def _least_error(letters: Sequence[Letter]) -> str:
    return min((letter["error"] for letter in letters if letter["error"] is not None), default="")
