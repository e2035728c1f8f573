"""Summary of a reconciliation for a person, counted where the letters are.

It is small, however many letters there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import reduce
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as f

from txmq.model.units import DAY, HOUR
from txmq_spark.concurrent_actions import at_once
from txmq_spark.letter_evidence import LETTER
from txmq_spark.plan import LetterClass

AGES: Final = ((HOUR, "under an hour"), (DAY, "under a day"), (7 * DAY, "under a week"))
OLDER: Final = "a week or more"
TOP_FAILURES: Final = 12  # the others are summed up
TOP_KEYS: Final = 100
LISTED_LETTERS: Final = 20  # of each class
LISTED_MISSING: Final = 100


class Failure(NamedTuple):
    """Letters that failed alike, and one of their errors."""

    error_type: str
    fingerprint: str
    error: str
    letters: int


class KeyCount(NamedTuple):
    """Letters of a key."""

    group: str
    topic: str
    key: str
    letters: int
    replayed: int
    oldest: int  # death, in microseconds


class Concentration(NamedTuple):
    """Spread of letters over keys: `top` has the keys with most letters."""

    keys: int
    letters: int  # with a key
    top: tuple[KeyCount, ...]

    def share(self, keys: int) -> float:
        """Return the share of letters that the first keys of `top` have."""
        return sum(one.letters for one in self.top[:keys]) / self.letters if self.letters else 0.0


class MissingMessage(NamedTuple):
    """A row or transaction without a message, or messages without a row.

    `what` is "transaction" or "key" for a row whose message is not in the log, and
    "row" for a key of messages that has none. `state` is "missing"; "pending" where the
    message is stored and undecided, or waits behind an earlier message of its key;
    "rolled back" where the broker decided against the committed row; "forgotten" where
    the transaction is too old for the broker to know whether its messages went to other
    topics; "removed?" where retention has removed messages that may have had the key.
    """

    what: str
    table: str | None
    name: str
    state: str
    at: int | None  # microseconds; None where the table has no time


class PlanSummary(NamedTuple):
    """Counts, and the first letters of each class. `now` is the time of ages."""

    now: int
    classes: dict[tuple[str, str], int]  # by group and class
    replayed: dict[tuple[str, str], int]
    ages: dict[tuple[str, str], int]  # by class and age
    failures: tuple[Failure, ...]
    other_failures: tuple[int, int]  # kinds, letters
    keys: Concentration
    samples: tuple[dict[str, Any], ...]
    missing: dict[tuple[str, str], int]  # by what and state
    missing_samples: tuple[MissingMessage, ...]

    @property
    def letters(self) -> int:
        """Number of letters."""
        return sum(self.classes.values())

    def of_class(self, cls: LetterClass) -> int:
        """Return the number of letters of a class."""
        return sum(count for (_group, one), count in self.classes.items() if one == cls)


MissingSummary = tuple[dict[tuple[str, str], int], tuple[MissingMessage, ...]]


class LetterCount(NamedTuple):
    """The number of letters of a kind."""

    group: str
    cls: str
    replay: bool
    age: str
    letters: int


def summarize(letters: DataFrame, missing: MissingSummary, now: int) -> PlanSummary:
    """Count the letters of a plan; `missing` is what is missing beside them."""
    by_class = letters.withColumn("age", _age(now)).groupBy("group", "class", "replay", "age")
    counts, failures, keys, samples = at_once(
        letters.sparkSession,
        by_class.count().collect,
        lambda: _failures(letters),
        lambda: _keys(letters),
        lambda: _samples(letters),
    )
    return summary_of([LetterCount(*row) for row in counts], failures, keys, samples, missing, now)


def summary_of(
    counts: Iterable[LetterCount],
    failures: tuple[tuple[Failure, ...], tuple[int, int]],
    keys: Concentration,
    samples: tuple[dict[str, Any], ...],
    missing: MissingSummary,
    now: int,
) -> PlanSummary:
    """Return the summary that has these parts."""
    classes, replayed, ages = Counter[Any](), Counter[Any](), Counter[Any]()
    for one in counts:
        classes[one.group, one.cls] += one.letters
        replayed[one.group, one.cls] += one.letters * one.replay
        ages[one.cls, one.age] += one.letters
    return PlanSummary(
        now,
        dict(sorted(classes.items())),
        dict(sorted(replayed.items())),
        dict(sorted(ages.items())),
        *failures,
        keys,
        samples,
        *missing,
    )


def age_of(micros: int) -> str:
    """Return the words for an age."""
    return next((words for limit, words in AGES if micros < limit), OLDER)


def _age(now: int) -> Column:
    age = f.lit(now) - f.col("dead_at")
    return reduce(
        lambda otherwise, one: f.when(age < one[0], one[1]).otherwise(otherwise),
        reversed(AGES),
        f.lit(OLDER),
    )


def _failures(letters: DataFrame) -> tuple[tuple[Failure, ...], tuple[int, int]]:
    found = letters.groupBy("error_type", "fingerprint").agg(
        f.count("*").alias("letters"), f.min("error").alias("error")
    )
    every = Window.partitionBy()
    order: list[Column | str] = [f.desc("letters"), "error_type", "fingerprint"]
    rows = (
        found.withColumns({"kinds": f.count("*").over(every), "all": f.sum("letters").over(every)})
        .orderBy(*order)
        .limit(TOP_FAILURES)
        .collect()
    )
    top = tuple(
        Failure(row["error_type"] or "", row["fingerprint"] or "", row["error"] or "", row.letters)
        for row in rows
    )
    if not rows:
        return (), (0, 0)
    return top, (rows[0]["kinds"] - len(top), rows[0]["all"] - sum(one.letters for one in top))


def _keys(letters: DataFrame) -> Concentration:
    keyed = letters.where("key IS NOT NULL").groupBy("group", "topic", "key")
    counted = keyed.agg(
        f.count("*").alias("letters"),
        f.sum(f.col("replay").cast("int")).alias("replayed"),
        f.min("dead_at").alias("oldest"),
    ).persist()
    totals = counted.agg(f.count("*").alias("keys"), f.sum("letters").alias("letters")).first()
    order: list[Column | str] = [f.desc("letters"), "group", "topic", "key"]
    top = tuple(KeyCount(*row) for row in counted.orderBy(*order).limit(TOP_KEYS).collect())
    counted.unpersist()
    assert totals is not None, "an aggregation has a row"
    return Concentration(totals["keys"], totals["letters"] or 0, top)


def _samples(letters: DataFrame) -> tuple[dict[str, Any], ...]:
    """Return the first letters of each class."""
    number = f.row_number().over(Window.partitionBy("class").orderBy(*LETTER))
    rows: list[Row] = (
        letters.withColumn("row", number).where(f.col("row") <= LISTED_LETTERS).collect()
    )
    ordered = sorted(rows, key=lambda row: (row["class"], row["row"]))
    return tuple(row.asDict() for row in ordered)


def summarize_missing(missing: DataFrame) -> MissingSummary:
    """Count what is missing, by what it is and its state, and list the first."""
    counts = missing.groupBy("what", "state").count().collect()
    order: list[Column | str] = [f.desc("what"), "table", "name"]
    first = missing.orderBy(*order).limit(LISTED_MISSING).collect()
    found = {(row["what"], row["state"]): row["count"] for row in counts}
    return dict(sorted(found.items())), tuple(MissingMessage(*row) for row in first)
