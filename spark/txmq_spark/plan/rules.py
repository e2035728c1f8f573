"""Classes of dead letters, and what a plan replays.

    pending           an undecided transaction acks or replays the letter
    applied           the effect is in the database: the handler failed after it,
                      or its ack was lost
    no_business_row   the row that the message is about was never committed, or is gone
    superseded        a newer version of the key is in the tables, or has been applied
    poison            the message would fail again
    replay_chain      safe, only in the order of the key's messages before and behind
    replay_alone      safe

A letter belongs to the first class that matches. The rules are expressions of Spark
over a row of evidence, and windows over the letters of a key. So they run where the
letters are, and the same letters in any order give the same plan.

These columns are the evidence; null = a table was not read, or has no answer:

    reserved          an undecided transaction acks or replays the letter
    applied           its effect is committed
    later_applied     a later offset of its key whose effect is committed
    token_state       of the transaction that sent it: committed, fenced or absent
    business_row      there is a row of its key
    version           of the key, in the message
    current_version   of the key, in the tables
    mistake           why its message cannot be judged
    deaths            deliveries during which the consumer was lost
    replays           how often it was replayed
    parked            later messages of its key that wait behind it
    error_type, fingerprint
"""

from __future__ import annotations

from enum import StrEnum
from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from txmq_spark.evidence.letter_evidence import chain_column


class LetterClass(StrEnum):
    """Classes of a letter by log and tables, explained above."""

    PENDING = "pending"
    APPLIED = "applied"
    NO_BUSINESS_ROW = "no_business_row"
    SUPERSEDED = "superseded"
    POISON = "poison"
    REPLAY_CHAIN = "replay_chain"
    REPLAY_ALONE = "replay_alone"


SAFE: Final = frozenset({LetterClass.REPLAY_ALONE, LetterClass.REPLAY_CHAIN})
# Letters of these classes that are not replayed may still take effect later. Later
# letters of their keys must not overtake them.
BLOCKING: Final = frozenset({LetterClass.PENDING, LetterClass.POISON})


class PlanRules(NamedTuple):
    """The rules for poison letters, and the classes that a plan includes."""

    replays: int = 2  # poison after so many failed replays
    deaths: int = 3  # poison after so many losses of the consumer
    error_types: frozenset[str] = frozenset()  # errors that are always poison
    fingerprints: frozenset[str] = frozenset()
    include: frozenset[LetterClass] = SAFE


Rule = tuple[Column, LetterClass, str | Column]


def classified(letters: DataFrame, rules: PlanRules) -> DataFrame:
    """Return letters with their `class`, the `reason`, and whether the plan is to
    `replay` them.
    """
    chain = ["group", "topic", "chain"]
    judged = letters.withColumns({"verdict": _verdict(rules), "chain": chain_column()})
    # Within a partition only offsets count: a transaction may be stored long before its
    # messages get offsets. Where a topic has grown, a key may be in two partitions; the
    # one that had it first comes first.
    born = f.min("stored_at").over(Window.partitionBy(*chain, "partition"))
    safe = f.sum(f.col("verdict").isNull().cast("int")).over(Window.partitionBy(*chain))
    judged = judged.repartition(*chain).withColumns({"born": born, "safe": safe})
    judged = judged.withColumn("verdict", f.coalesce("verdict", _safe()))
    cls, included = f.col("verdict")["class"], f.col("verdict")["class"].isin(*rules.include)
    stays = f.when(
        ~included & cls.isin(*BLOCKING),
        f.concat("partition", f.lit("/"), "offset", f.lit(" of its key, which is "), cls),
    )
    before = (
        Window.partitionBy(*chain)
        .orderBy("born", "partition", "offset")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    judged = judged.withColumn("behind", f.first(stays, ignorenulls=True).over(before))
    blocked = included & f.col("behind").isNotNull()
    because = f.concat(f.lit("behind "), "behind", f.lit(" and stays"))
    return judged.withColumns(
        {
            "class": cls,
            "reason": f.when(blocked, because).otherwise(f.col("verdict")["reason"]),
            "replay": included & f.col("behind").isNull(),
        }
    ).drop("verdict", "chain", "born", "safe", "behind")


def _verdict(rules: PlanRules) -> Column:
    """Return the class of a letter and the reason; null where it may be replayed."""
    ordered = [*_settled(), *_superseded(), *_poison(rules)]
    first, *others = ordered
    return reduce(
        lambda so_far, rule: so_far.when(rule[0], _class_and_reason(*rule[1:])),
        others,
        f.when(first[0], _class_and_reason(*first[1:])),
    )


def _class_and_reason(cls: LetterClass, reason: str | Column) -> Column:
    text = f.lit(reason) if isinstance(reason, str) else reason
    return f.struct(f.lit(str(cls)).alias("class"), text.alias("reason"))


def _settled() -> list[Rule]:
    nothing = LetterClass.NO_BUSINESS_ROW
    state = f.col("token_state")
    return [
        (f.col("reserved"), LetterClass.PENDING, "an undecided transaction acks or replays it"),
        (f.col("applied"), LetterClass.APPLIED, "its effect is committed"),
        (state == "fenced", nothing, "its transaction was decided as rolled back"),
        (state == "absent", nothing, "its transaction left no row in the database"),
        (~f.col("business_row"), nothing, "there is no row of its key"),
    ]


def _superseded() -> list[Rule]:
    later, version, current = f.col("later_applied"), f.col("version"), f.col("current_version")
    by_offset = f.format_string("offset %d of its key has been applied", later)
    by_version = f.format_string("it has version %d, the tables have %d", version, current)
    return [
        (later.isNotNull(), LetterClass.SUPERSEDED, by_offset),
        (version < current, LetterClass.SUPERSEDED, by_version),
    ]


def _poison(rules: PlanRules) -> list[Rule]:
    deaths, replays = f.col("deaths"), f.col("replays")
    kind, print_ = f.col("error_type"), f.col("fingerprint")
    found: list[tuple[Column, Column]] = [
        (f.col("mistake").isNotNull(), f.col("mistake")),
        (deaths >= rules.deaths, f.format_string("its consumer died of it %d times", deaths)),
        (
            replays >= rules.replays,
            f.format_string("it was replayed %d times and failed again", replays),
        ),
        (
            kind.isin(*sorted(rules.error_types)),
            f.format_string("errors of type %s do not heal", kind),
        ),
        (
            print_.isin(*sorted(rules.fingerprints)),
            f.format_string("failures like %s do not heal", print_),
        ),
    ]
    return [(condition, LetterClass.POISON, reason) for condition, reason in found]


def _safe() -> Column:
    chain = LetterClass.REPLAY_CHAIN
    return (
        f.when(
            f.col("safe") > 1,
            _class_and_reason(chain, "in order with the other letters of its key"),
        )
        .when(
            f.col("parked") > 0,
            _class_and_reason(
                chain, f.format_string("%d messages of its key wait behind it", f.col("parked"))
            ),
        )
        .otherwise(_class_and_reason(LetterClass.REPLAY_ALONE, "nothing speaks against it"))
    )
