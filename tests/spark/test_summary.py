"""Counts of a plan's letters, beside those of a loop over them."""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from tests.spark.letters import Letter, letter, letter_frame
from txmq.model.units import HOUR
from txmq_spark.evidence.letter_evidence import LETTER
from txmq_spark.evidence.missing_messages import MISSING
from txmq_spark.plan.parts import arranged, in_parts
from txmq_spark.plan.rules import PlanRules, classified
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
    MissingMessage,
    PlanSummary,
    _keys,
    summarized,
)
from txmq_spark.session.kept_frames import KeptFrames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import SparkSession

NOW = 100 * 24 * HOUR
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


def varied_missing(chance: Random, count: int) -> list[MissingMessage]:
    return [
        MissingMessage(
            chance.choice(["row", "key", "transaction"]),
            chance.choice([None, "orders", "refunds"]),
            f"{chance.choice(TEXTS)} {number}",
            chance.choice(["missing", "removed?"]),
            chance.choice([None, NOW]),
        )
        for number in range(count)
    ]


def counted(letters: Sequence[Letter], missing: Iterable[MissingMessage], now: int) -> PlanSummary:
    """Return the summary of letters that have a class, as a loop counts them."""
    failures, keys, classes = (
        grouped(letters, *names)
        for names in (("error_type", "fingerprint"), ("group", "topic", "key"), ("class",))
    )
    keys = {kind: some for kind, some in keys.items() if kind[2] is not None}
    frequent = sorted(failures, key=lambda kind: (-len(failures[kind]), *map(null_first, kind)))
    top = tuple(
        Failure(kind[0] or "", kind[1] or "", least_error(failures[kind]), len(failures[kind]))
        for kind in frequent[:TOP_FAILURES]
    )
    of_keys = [
        KeyCount._make(
            (
                *(*kind, len(some)),
                sum(one["replay"] for one in some),
                min(one["dead_at"] for one in some),
            )
        )
        for kind, some in keys.items()
    ]
    of_keys.sort(key=lambda one: (-one.letters, one.group, one.topic, one.key))
    first = sorted(missing, key=lambda one: (null_first(one.table), one.name))
    first.sort(key=lambda one: one.what, reverse=True)
    replayed = Counter({(one["group"], one["class"]): 0 for one in letters})
    replayed.update((one["group"], one["class"]) for one in letters if one["replay"])
    return PlanSummary(
        now=now,
        classes=dict(Counter((one["group"], one["class"]) for one in letters)),
        replayed=dict(replayed),
        ages=dict(Counter((one["class"], age_of(now - one["dead_at"])) for one in letters)),
        failures=top,
        other_failures=(
            len(failures) - len(top),
            len(letters) - sum(one.letters for one in top),
        ),
        keys=Concentration(len(keys), sum(map(len, keys.values())), tuple(of_keys[:TOP_KEYS])),
        samples=tuple(
            one | {"row": number}
            for _class, some in sorted(classes.items())
            for number, one in enumerate(sorted(some, key=itemgetter(*LETTER)), 1)
            if number <= LISTED_LETTERS
        ),
        missing=dict(Counter((one.what, one.state) for one in first)),
        missing_samples=tuple(first[:LISTED_MISSING]),
    )


def grouped(letters: Iterable[Letter], *names: str) -> dict[tuple[Any, ...], list[Letter]]:
    found = defaultdict[tuple[Any, ...], list[Letter]](list)
    for one in letters:
        found[tuple(one[name] for name in names)].append(one)
    return found


def null_first(text: str | None) -> tuple[bool, str]:
    return text is not None, text or ""


def least_error(letters: Iterable[Letter]) -> str:
    return min((one["error"] for one in letters if one["error"] is not None), default="")


def age_of(micros: int) -> str:
    return next((words for limit, words in AGES if micros < limit), OLDER)


@pytest.mark.parametrize("count", [0, 1, 600])
def test_executors_count_letters_and_what_is_missing(spark: SparkSession, count: int) -> None:
    chance = Random(count)
    rows, missing = varied(chance, count), varied_missing(chance, count // 2)
    with KeptFrames() as kept:
        placed = in_parts(letter_frame(spark, rows))
        plan = kept.keep(arranged(classified(placed.frame, PlanRules()), placed.parts))
        letters = [row.asDict() for row in plan.collect()]
        found = summarized(plan, spark.createDataFrame(missing, MISSING), NOW)
        assert found == counted(letters, missing, NOW)
        youngest = max((one["dead_at"] for one in rows), default=0)
        nothing = spark.createDataFrame([], MISSING)
        assert summarized(plan, nothing, None) == counted(letters, [], youngest)


def test_counts_that_fail_leave_no_frame_behind(spark: SparkSession) -> None:
    cached: Any = spark._jsparkSession.sharedState().cacheManager().numCachedEntries
    before = cached()
    columns = ("'g' AS `group`", "'t' AS topic", "'k' AS key", "id = 0 AS replay")
    rows = spark.range(1).selectExpr(*columns, "bigint(raise_error('lost')) AS dead_at")
    with pytest.raises(PySparkException, match="lost"):
        _keys(rows)
    assert cached() == before
