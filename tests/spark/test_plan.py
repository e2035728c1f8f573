"""Classes of letters, and the order and the chunks of what is replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.letters import letter
from txmq_spark.plan import BLOCKING, Class, Letter, Planned, Rules, Token, plan

ALL = frozenset(Class)


@dataclass
class Case:
    """Evidence, and what it must come to."""

    cls: Class
    says: str
    fields: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case(Class.REPLAY_ALONE, "nothing"),
    Case(
        Class.REPLAY_ALONE,
        "nothing",
        {"applied": False, "token": Token.COMMITTED, "business_row": True},
    ),
    Case(Class.REPLAY_ALONE, "nothing", {"version": 3, "current_version": 3}),
    Case(Class.REPLAY_ALONE, "nothing", {"version": 3}),
    Case(Class.REPLAY_CHAIN, "wait behind", {"parked": 4}),
    Case(Class.PENDING, "undecided", {"busy": True}),
    Case(Class.PENDING, "undecided", {"busy": True, "applied": True}),
    Case(Class.APPLIED, "committed", {"applied": True}),
    Case(Class.APPLIED, "committed", {"applied": True, "later_applied": 99, "token": Token.ABSENT}),
    Case(Class.NO_BUSINESS_ROW, "left no row", {"token": Token.ABSENT}),
    Case(Class.NO_BUSINESS_ROW, "rolled back", {"token": Token.FENCED}),
    Case(Class.NO_BUSINESS_ROW, "no row of its key", {"business_row": False}),
    Case(Class.NO_BUSINESS_ROW, "no row of its key", {"business_row": False, "later_applied": 4}),
    Case(Class.SUPERSEDED, "offset 12", {"later_applied": 12}),
    Case(Class.SUPERSEDED, "version 3, the tables have 4", {"version": 3, "current_version": 4}),
    Case(Class.SUPERSEDED, "offset 12", {"later_applied": 12, "deaths": 9}),
    Case(Class.POISON, "cannot be read", {"readable": False}),
    Case(Class.POISON, "died of it 3", {"deaths": 3}),
    Case(Class.POISON, "replayed 2 times", {"replays": 2}),
    Case(Class.POISON, "BadOrder", {"error_type": "BadOrder"}),
    Case(Class.POISON, "f00", {"fingerprint": "f00"}),
    Case(
        Class.REPLAY_ALONE,
        "nothing",
        {"deaths": 2, "replays": 1, "error_type": "Timeout", "fingerprint": "f01"},
    ),
]
RULES = Rules(error_types=frozenset({"BadOrder"}), fingerprints=frozenset({"f00"}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cls} {case.says}")
def test_the_class_of_a_letter(case: Case) -> None:
    [planned] = plan([letter(7, "k", **case.fields)], RULES)
    assert (planned.cls, planned.chunk is not None) == (case.cls, case.cls in RULES.include)
    assert case.says in planned.reason


def test_every_class_is_reached_by_some_case() -> None:
    assert {case.cls for case in CASES} == ALL


def test_safe_letters_of_one_key_are_a_chain_in_order() -> None:
    found = plan([letter(9, "k"), letter(3, "k"), letter(5, "other"), letter(4)], Rules())
    assert [(item.letter.offset, item.cls) for item in found] == [
        (3, Class.REPLAY_CHAIN),
        (9, Class.REPLAY_CHAIN),
        (4, Class.REPLAY_ALONE),
        (5, Class.REPLAY_ALONE),
    ]


@pytest.mark.parametrize("first", [{"busy": True}, {"deaths": 3}])
def test_nothing_overtakes_a_letter_of_its_key_that_stays(first: dict[str, Any]) -> None:
    found = plan(
        [letter(1, "k", **first), letter(2, "k"), letter(3, "k"), letter(4, "other")], Rules()
    )
    assert [item.letter.offset for item in found if item.chunk is not None] == [4]
    assert all(
        "behind 0/1 of its key" in item.reason for item in found if item.letter.offset in (2, 3)
    )


@pytest.mark.parametrize(
    "first", [{"applied": True}, {"token": Token.ABSENT}, {"later_applied": 2}]
)
def test_a_letter_without_an_effect_to_come_holds_up_nothing(first: dict[str, Any]) -> None:
    found, _left = plan([letter(1, "k", **first), letter(2, "k")], Rules())
    assert (found.letter.offset, found.chunk, found.cls) == (2, 0, Class.REPLAY_ALONE)


def test_classes_are_taken_only_where_asked_for() -> None:
    poison = letter(1, "k", deaths=3)
    wanted = plan(
        [poison, letter(2, "k")], Rules(include=frozenset({Class.POISON, Class.REPLAY_ALONE}))
    )
    assert [item.chunk for item in wanted] == [0, 0]


def test_a_key_that_moved_when_its_topic_grew_goes_in_the_order_of_its_partitions() -> None:
    old = [letter(50, "k", partition=6, stored_at=100), letter(51, "k", partition=6, stored_at=101)]
    new = [letter(0, "k", partition=2, stored_at=500), letter(1, "k", partition=2, stored_at=501)]
    found = plan([*new, *reversed(old)], Rules())
    assert [item.letter for item in found] == [*old, *new]


def test_offsets_count_more_than_times_within_a_partition() -> None:
    """A transaction is stored when it is sent and gets its offsets when it is
    published.
    """
    found = plan([letter(2, "k", stored_at=10), letter(1, "k", stored_at=20)], Rules())
    assert [item.letter.offset for item in found] == [1, 2]


def test_the_same_letter_twice_is_planned_once() -> None:
    assert len(plan([letter(1, "k"), letter(1, "k")], Rules())) == 1


def test_a_chunk_is_full_before_the_next_begins() -> None:
    found = plan([letter(n) for n in range(10)], Rules(chunk=4))
    assert [item.chunk for item in found] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


LETTERS = st.lists(
    st.builds(
        letter,
        offset=st.integers(0, 40),
        key=st.sampled_from([None, "a", "b", "c\n\u2028"]),
        partition=st.integers(0, 2),
        stored_at=st.integers(0, 50),
        applied=st.sampled_from([None, False, True]),
        busy=st.sampled_from([False, False, True]),
        deaths=st.integers(0, 3),
        later_applied=st.none() | st.just(41),
    ),
    max_size=40,
    unique_by=lambda one: (one.partition, one.offset),
)
RULE = st.builds(Rules, chunk=st.integers(1, 6), include=st.frozensets(st.sampled_from(Class)))


@given(LETTERS, RULE, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_letters(
    letters: list[Letter], rules: Rules, chance: Random
) -> None:
    shuffled = list(letters)
    chance.shuffle(shuffled)
    assert plan(shuffled, rules) == plan(letters, rules)


@given(LETTERS, RULE)
def test_every_letter_is_planned_once_and_each_key_stays_whole_and_in_order(
    letters: list[Letter], rules: Rules
) -> None:
    found = plan(letters, rules)
    assert sorted(item.letter for item in found) == sorted(letters)
    taken = [item for item in found if item.chunk is not None]
    assert found[: len(taken)] == taken
    assert {item.chunk for item in taken} == set(range(len({item.chunk for item in taken})))
    by_key = [item for item in taken if item.letter.key]
    for _key, same in groupby(
        sorted(by_key, key=lambda item: item.letter.key or ""), key=lambda item: item.letter.key
    ):
        in_order(list(same), found)


def in_order(chain: list[Planned], found: list[Planned]) -> None:
    """One chunk; by offset within a partition; nothing left behind that others
    overtake.
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
def test_a_chunk_is_longer_than_asked_for_only_for_the_sake_of_one_key(
    letters: list[Letter], rules: Rules
) -> None:
    chunks: dict[int, list[Letter]] = {}
    for item in plan(letters, rules):
        if item.chunk is not None:
            chunks.setdefault(item.chunk, []).append(item.letter)
    for inside in chunks.values():
        assert len(inside) <= rules.chunk or len({one.key for one in inside}) == 1
