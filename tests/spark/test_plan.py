"""Classes of letters, and which of them a plan replays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING, Any

from tests.spark.letters import Letter, letter, letter_frame
from txmq_spark.plan.rules import BLOCKING, SAFE, LetterClass, PlanRules, classified

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALL = frozenset(LetterClass)


@dataclass
class Case:
    """Evidence, and the expected class and reason."""

    cls: LetterClass
    says: str
    fields: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case(LetterClass.REPLAY_ALONE, "nothing"),
    Case(
        LetterClass.REPLAY_ALONE,
        "nothing",
        {"applied": False, "token_state": "committed", "business_row": True},
    ),
    Case(LetterClass.REPLAY_ALONE, "nothing", {"version": 3, "current_version": 3}),
    Case(LetterClass.REPLAY_ALONE, "nothing", {"version": 3}),
    Case(LetterClass.REPLAY_CHAIN, "wait behind", {"parked": 4}),
    Case(LetterClass.PENDING, "undecided", {"reserved": True}),
    Case(LetterClass.PENDING, "undecided", {"reserved": True, "applied": True}),
    Case(LetterClass.APPLIED, "committed", {"applied": True}),
    Case(
        LetterClass.APPLIED,
        "committed",
        {"applied": True, "later_applied": 99, "token_state": "absent"},
    ),
    Case(LetterClass.NO_BUSINESS_ROW, "left no row", {"token_state": "absent"}),
    Case(LetterClass.NO_BUSINESS_ROW, "rolled back", {"token_state": "fenced"}),
    Case(LetterClass.NO_BUSINESS_ROW, "no row of its key", {"business_row": False}),
    Case(
        LetterClass.NO_BUSINESS_ROW,
        "no row of its key",
        {"business_row": False, "later_applied": 4},
    ),
    Case(LetterClass.SUPERSEDED, "offset 12", {"later_applied": 12}),
    Case(
        LetterClass.SUPERSEDED, "version 3, the tables have 4", {"version": 3, "current_version": 4}
    ),
    Case(LetterClass.SUPERSEDED, "offset 12", {"later_applied": 12, "deaths": 9}),
    Case(LetterClass.POISON, "cannot be read", {"mistake": "its version cannot be read"}),
    Case(LetterClass.POISON, "died of it 3", {"deaths": 3}),
    Case(LetterClass.POISON, "replayed 2 times", {"replays": 2}),
    Case(LetterClass.POISON, "BadOrder", {"error_type": "BadOrder"}),
    Case(LetterClass.POISON, "f00", {"fingerprint": "f00"}),
    Case(
        LetterClass.REPLAY_ALONE,
        "nothing",
        {"deaths": 2, "replays": 1, "error_type": "Timeout", "fingerprint": "f01"},
    ),
]
RULES = PlanRules(error_types=frozenset({"BadOrder"}), fingerprints=frozenset({"f00"}))
Place = tuple[str, int, int]
Verdict = tuple[LetterClass, bool, str]  # class, whether it is replayed, reason


def judged(
    spark: SparkSession, letters: Sequence[Letter], rules: PlanRules | None = None
) -> dict[Place, Verdict]:
    found = classified(letter_frame(spark, letters), rules or PlanRules()).collect()
    assert len(found) == len(letters)
    return {
        (row["topic"], row["partition"], row["offset"]): (
            LetterClass(row["class"]),
            row["replay"],
            row["reason"],
        )
        for row in found
    }


def test_the_class_of_each_letter(spark: SparkSession) -> None:
    letters = [letter(at, f"k{at}", **case.fields) for at, case in enumerate(CASES)]
    found = judged(spark, letters, RULES)
    for at, case in enumerate(CASES):
        cls, replayed, reason = found["orders", 0, at]
        assert (cls, replayed) == (case.cls, case.cls in RULES.include), case
        assert case.says in reason
    assert {case.cls for case in CASES} == ALL


SCENES: dict[str, tuple[list[Letter], list[tuple[LetterClass, bool]]]] = {
    "safe letters of a key are a chain": (
        [letter(9, "k"), letter(3, "k"), letter(4)],
        [
            (LetterClass.REPLAY_CHAIN, True),
            (LetterClass.REPLAY_CHAIN, True),
            (LetterClass.REPLAY_ALONE, True),
        ],
    ),
    "nothing overtakes a pending letter": (
        [letter(1, "k", reserved=True), letter(2, "k"), letter(3, "k")],
        [
            (LetterClass.PENDING, False),
            (LetterClass.REPLAY_CHAIN, False),
            (LetterClass.REPLAY_CHAIN, False),
        ],
    ),
    "nothing overtakes a poison letter": (
        [letter(1, "k"), letter(2, "k", deaths=3), letter(3, "k")],
        [
            (LetterClass.REPLAY_CHAIN, True),
            (LetterClass.POISON, False),
            (LetterClass.REPLAY_CHAIN, False),
        ],
    ),
    "a letter whose effect is there blocks none": (
        [letter(1, "k", applied=True), letter(2, "k")],
        [(LetterClass.APPLIED, False), (LetterClass.REPLAY_ALONE, True)],
    ),
    "letters without a key, or with an empty one, are no chain": (
        [letter(1, deaths=3), letter(2), letter(3, ""), letter(4, "")],
        [(LetterClass.POISON, False), *[(LetterClass.REPLAY_ALONE, True)] * 3],
    ),
    "a key of another topic or group is another key": (
        [letter(1, "k", deaths=3), letter(1, "k", topic="t"), letter(2, "k", group="g")],
        [
            (LetterClass.POISON, False),
            (LetterClass.REPLAY_ALONE, True),
            (LetterClass.REPLAY_ALONE, True),
        ],
    ),
    "a key that moved when its topic grew goes in the order of its partitions": (
        [
            letter(0, "k", partition=2, stored_at=500),
            letter(50, "k", partition=6, stored_at=100, deaths=3),
        ],
        [(LetterClass.REPLAY_ALONE, False), (LetterClass.POISON, False)],
    ),
    "offsets count more than times within a partition": (
        [letter(2, "k", stored_at=10, deaths=3), letter(1, "k", stored_at=20)],
        [(LetterClass.POISON, False), (LetterClass.REPLAY_ALONE, True)],
    ),
}


def test_chains(spark: SparkSession) -> None:
    letters = [
        one | {"topic": f"{one['topic']} {scene}"}
        for scene, (several, _classes) in enumerate(SCENES.values())
        for one in several
    ]
    found = judged(spark, letters)
    for scene, (name, (several, classes)) in enumerate(SCENES.items()):
        places = [(f"{one['topic']} {scene}", one["partition"], one["offset"]) for one in several]
        assert [found[place][:2] for place in places] == classes, name


def random_letters(chance: Random, count: int) -> list[Letter]:
    places = chance.sample([(p, o) for p in range(3) for o in range(count)], count)
    return [
        letter(
            offset,
            chance.choice([None, "", "a", "b", "c\n\u2028", "d"]),
            partition=partition,
            stored_at=chance.randrange(50),
            applied=chance.choice([None, False, True]),
            reserved=chance.random() < 0.1,
            deaths=chance.randrange(4),
            later_applied=chance.choice([None, None, 41]),
            parked=chance.choice([0, 0, 2]),
        )
        for partition, offset in places
    ]


def test_the_expressions_judge_as_a_simple_program_does(spark: SparkSession) -> None:
    chance = Random(7)
    letters = [
        one | {"topic": f"t{topic}"}
        for topic in range(25)
        for one in random_letters(chance, chance.randrange(1, 20))
    ]
    for include in (SAFE, SAFE | {LetterClass.POISON}, frozenset({LetterClass.REPLAY_CHAIN})):
        found = judged(spark, letters, PlanRules(include=include))
        expected = dict(simple_plan(letters, include))
        assert {place: verdict[:2] for place, verdict in found.items()} == expected


def simple_plan(
    letters: Sequence[Letter], include: frozenset[LetterClass]
) -> Iterator[tuple[Place, tuple[LetterClass, bool]]]:
    """Judge the letters of each key, one after the other, as plans did at first."""

    def chain_of(one: Letter) -> tuple[str, str]:
        return one["topic"], one["key"] or f"\0{one['partition']}/{one['offset']}"

    for _key, same in groupby(sorted(letters, key=chain_of), key=chain_of):
        chain = list(same)
        born: dict[int, int] = {}
        for one in chain:
            before = born.get(one["partition"], one["stored_at"])
            born[one["partition"]] = min(one["stored_at"], before)
        chain.sort(key=lambda one: (born[one["partition"]], one["partition"], one["offset"]))
        classes = [simple_class(one) for one in chain]
        several, blocked = classes.count(None) > 1, False
        for one, found in zip(chain, classes, strict=True):
            linked = several or one["parked"]
            cls = found or (LetterClass.REPLAY_CHAIN if linked else LetterClass.REPLAY_ALONE)
            place = one["topic"], one["partition"], one["offset"]
            yield place, (cls, cls in include and not blocked)
            blocked = blocked or (cls not in include and cls in BLOCKING)


def simple_class(one: Letter) -> LetterClass | None:
    if one["reserved"]:
        return LetterClass.PENDING
    if one["applied"]:
        return LetterClass.APPLIED
    if one["later_applied"] is not None:
        return LetterClass.SUPERSEDED
    return LetterClass.POISON if one["deaths"] >= 3 else None
