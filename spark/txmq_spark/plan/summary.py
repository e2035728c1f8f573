"""Summary of a reconciliation for a person, which is small for any number of letters:
executors count them.
"""

from __future__ import annotations

from collections import Counter
from functools import reduce
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as f

from txmq.model.units import DAY, HOUR
from txmq_spark.evidence.letter_evidence import LETTER
from txmq_spark.plan.rules import LetterClass
from txmq_spark.session.kept_frames import KeptFrames

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


def summarized(letters: DataFrame, missing: DataFrame, now: int | None) -> PlanSummary:
    """Return the summary of a plan's letters, and of what is missing beside them.

    `now` is the time of ages in microseconds; None = that of the last death.
    """
    now = _last_death(letters) if now is None else now
    classes, replayed, ages = Counter[Any](), Counter[Any](), Counter[Any]()
    kinds = letters.groupBy("group", "class", "replay", _age(now)).count()
    for group, cls, replay, age, count in kinds.collect():
        classes[group, cls] += count
        replayed[group, cls] += count * replay
        ages[cls, age] += count
    failures, other_failures = _failures(letters)
    states = missing.groupBy("what", "state").count().collect()
    order: list[Column | str] = [f.desc("what"), "table", "name"]
    first = missing.orderBy(*order).limit(LISTED_MISSING).collect()
    return PlanSummary(
        now=now,
        classes=dict(sorted(classes.items())),
        replayed=dict(sorted(replayed.items())),
        ages=dict(sorted(ages.items())),
        failures=failures,
        other_failures=other_failures,
        keys=_keys(letters),
        samples=_samples(letters),
        missing=dict(sorted(((what, state), count) for what, state, count in states)),
        missing_samples=tuple(MissingMessage(*row) for row in first),
    )


def _last_death(letters: DataFrame) -> int:
    """Return the time of the last death; 0 = there are no letters."""
    found = letters.agg(f.max("dead_at").alias("at")).first()
    return int((found and found["at"]) or 0)


def _age(now: int) -> Column:
    """Return the words for the age of a letter."""
    age = f.lit(now) - f.col("dead_at")
    return reduce(
        lambda otherwise, one: f.when(age < one[0], one[1]).otherwise(otherwise),
        reversed(AGES),
        f.lit(OLDER),
    )


def _failures(letters: DataFrame) -> tuple[tuple[Failure, ...], tuple[int, int]]:
    """Return the most frequent failures, and the kinds and letters of the others."""
    found = letters.groupBy("error_type", "fingerprint").agg(
        f.count("*").alias("letters"), f.min("error").alias("error")
    )
    every = Window.partitionBy()
    totals = {"kinds": f.count("*").over(every), "all": f.sum("letters").over(every)}
    order: list[Column | str] = [f.desc("letters"), "error_type", "fingerprint"]
    rows = found.withColumns(totals).orderBy(*order).limit(TOP_FAILURES).collect()
    if not rows:
        return (), (0, 0)
    top = tuple(
        Failure(row["error_type"] or "", row["fingerprint"] or "", row["error"] or "", row.letters)
        for row in rows
    )
    return top, (rows[0]["kinds"] - len(top), rows[0]["all"] - sum(one.letters for one in top))


def _keys(letters: DataFrame) -> Concentration:
    keyed = letters.where("key IS NOT NULL").groupBy("group", "topic", "key")
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


def _samples(letters: DataFrame) -> tuple[dict[str, Any], ...]:
    """Return the first letters of each class."""
    number = f.row_number().over(Window.partitionBy("class").orderBy(*LETTER))
    rows: list[Row] = (
        letters.withColumn("row", number).where(f.col("row") <= LISTED_LETTERS).collect()
    )
    ordered = sorted(rows, key=lambda row: (row["class"], row["row"]))
    return tuple(row.asDict() for row in ordered)
