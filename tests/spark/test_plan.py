"""Classes of letters, and the order and the chunks of the replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.letters import letter
from txmq_spark.plan import (
    BLOCKING,
    Letter,
    LetterClass,
    PlannedLetter,
    PlanRules,
    TokenEvidence,
    make_plan,
)

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
        {"applied": False, "token": TokenEvidence.COMMITTED, "business_row": True},
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
        {"applied": True, "later_applied": 99, "token": TokenEvidence.ABSENT},
    ),
    Case(LetterClass.NO_BUSINESS_ROW, "left no row", {"token": TokenEvidence.ABSENT}),
    Case(LetterClass.NO_BUSINESS_ROW, "rolled back", {"token": TokenEvidence.FENCED}),
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
    Case(LetterClass.POISON, "cannot be read", {"readable": False}),
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cls} {case.says}")
def test_the_class_of_a_letter(case: Case) -> None:
    [planned] = make_plan([letter(7, "k", **case.fields)], RULES)
    assert (planned.cls, planned.chunk is not None) == (case.cls, case.cls in RULES.include)
    assert case.says in planned.reason


def test_every_class_is_reached_by_some_case() -> None:
    assert {case.cls for case in CASES} == ALL


def test_safe_letters_of_one_key_are_a_chain_in_order() -> None:
    found = make_plan([letter(9, "k"), letter(3, "k"), letter(5, "other"), letter(4)], PlanRules())
    assert [(item.letter.offset, item.cls) for item in found] == [
        (3, LetterClass.REPLAY_CHAIN),
        (9, LetterClass.REPLAY_CHAIN),
        (4, LetterClass.REPLAY_ALONE),
        (5, LetterClass.REPLAY_ALONE),
    ]


@pytest.mark.parametrize("first", [{"reserved": True}, {"deaths": 3}])
def test_nothing_overtakes_a_letter_of_its_key_that_stays(first: dict[str, Any]) -> None:
    found = make_plan(
        [letter(1, "k", **first), letter(2, "k"), letter(3, "k"), letter(4, "other")], PlanRules()
    )
    assert [item.letter.offset for item in found if item.chunk is not None] == [4]
    assert all(
        "behind 0/1 of its key" in item.reason for item in found if item.letter.offset in (2, 3)
    )


@pytest.mark.parametrize(
    "first", [{"applied": True}, {"token": TokenEvidence.ABSENT}, {"later_applied": 2}]
)
def test_a_letter_without_a_later_effect_blocks_no_other(first: dict[str, Any]) -> None:
    found, _left = make_plan([letter(1, "k", **first), letter(2, "k")], PlanRules())
    assert (found.letter.offset, found.chunk, found.cls) == (2, 0, LetterClass.REPLAY_ALONE)


def test_other_classes_are_replayed_only_on_request() -> None:
    poison = letter(1, "k", deaths=3)
    wanted = make_plan(
        [poison, letter(2, "k")],
        PlanRules(include=frozenset({LetterClass.POISON, LetterClass.REPLAY_ALONE})),
    )
    assert [item.chunk for item in wanted] == [0, 0]


def test_a_key_that_moved_when_its_topic_grew_goes_in_the_order_of_its_partitions() -> None:
    old = [letter(50, "k", partition=6, stored_at=100), letter(51, "k", partition=6, stored_at=101)]
    new = [letter(0, "k", partition=2, stored_at=500), letter(1, "k", partition=2, stored_at=501)]
    found = make_plan([*new, *reversed(old)], PlanRules())
    assert [item.letter for item in found] == [*old, *new]


def test_offsets_count_more_than_times_within_a_partition() -> None:
    """A transaction is stored when it is sent, and gets its offsets at publication."""
    found = make_plan([letter(2, "k", stored_at=10), letter(1, "k", stored_at=20)], PlanRules())
    assert [item.letter.offset for item in found] == [1, 2]


def test_the_same_letter_twice_is_planned_once() -> None:
    assert len(make_plan([letter(1, "k"), letter(1, "k")], PlanRules())) == 1


def test_a_chunk_is_full_before_the_next_begins() -> None:
    found = make_plan([letter(n) for n in range(10)], PlanRules(chunk=4))
    assert [item.chunk for item in found] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


LETTERS = st.lists(
    st.builds(
        letter,
        offset=st.integers(0, 40),
        key=st.sampled_from([None, "a", "b", "c\n\u2028"]),
        partition=st.integers(0, 2),
        stored_at=st.integers(0, 50),
        applied=st.sampled_from([None, False, True]),
        reserved=st.sampled_from([False, False, True]),
        deaths=st.integers(0, 3),
        later_applied=st.none() | st.just(41),
    ),
    max_size=40,
    unique_by=lambda one: (one.partition, one.offset),
)
RULE = st.builds(
    PlanRules, chunk=st.integers(1, 6), include=st.frozensets(st.sampled_from(LetterClass))
)


@given(LETTERS, RULE, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_letters(
    letters: list[Letter], rules: PlanRules, chance: Random
) -> None:
    shuffled = list(letters)
    chance.shuffle(shuffled)
    assert make_plan(shuffled, rules) == make_plan(letters, rules)


@given(LETTERS, RULE)
def test_every_letter_is_planned_once_and_each_key_stays_whole_and_in_order(
    letters: list[Letter], rules: PlanRules
) -> None:
    found = make_plan(letters, rules)
    assert sorted(item.letter for item in found) == sorted(letters)
    taken = [item for item in found if item.chunk is not None]
    assert found[: len(taken)] == taken
    assert {item.chunk for item in taken} == set(range(len({item.chunk for item in taken})))
    by_key = [item for item in taken if item.letter.key]
    for _key, same in groupby(
        sorted(by_key, key=lambda item: item.letter.key or ""), key=lambda item: item.letter.key
    ):
        in_order(list(same), found)


def in_order(chain: list[PlannedLetter], found: list[PlannedLetter]) -> None:
    """The letters are in one chunk, and in the order of offsets within a partition.

    No letter that stays is overtaken.
    """
    assert len({item.chunk for item in chain}) == 1
    for one, other in pairwise(chain):
        assert (
            one.letter.partition != other.letter.partition
            or one.letter.offset < other.letter.offset
        )
    for item in chain:
        earlier = [
            left
            for left in found
            if left.chunk is None
            and left.letter.key == item.letter.key
            and left.letter.partition == item.letter.partition
            and left.letter.offset < item.letter.offset
        ]
        assert not any(left.cls in BLOCKING for left in earlier)


@given(LETTERS, RULE)
def test_only_a_key_with_many_letters_makes_a_chunk_longer(
    letters: list[Letter], rules: PlanRules
) -> None:
    chunks: dict[int, list[Letter]] = {}
    for item in make_plan(letters, rules):
        if item.chunk is not None:
            chunks.setdefault(item.chunk, []).append(item.letter)
    for inside in chunks.values():
        assert len(inside) <= rules.chunk or len({one.key for one in inside}) == 1
