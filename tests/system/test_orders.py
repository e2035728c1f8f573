"""The judge of transactions finds what it is there to find: damage of each kind planted
among sound orders.
"""

from __future__ import annotations

import pytest

from tests.system.orders import Order, Outcome, faults, misjudged, wrong_effects

ROWS = [Order("1", "a", 1), Order("2", "b", 1), Order("3", "a", 2), Order("4", "a", 3)]
TOLD = {
    "1": Outcome.COMMITTED,
    "2": Outcome.BEGAN,
    "3": Outcome.UNKNOWN,
    "4": Outcome.COMMITTED,
    "5": Outcome.ABORTED,
    "6": Outcome.BEGAN,
    "7": Outcome.UNKNOWN,
}
PHANTOM = Order("6", "b", 2)


def test_sound_orders_have_no_faults() -> None:
    assert faults(TOLD, ROWS, ROWS) == []
    assert faults(TOLD, ROWS, sorted(ROWS, key=lambda order: order.key)) == []
    assert Order.decode(ROWS[0].encode()) == ROWS[0]


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (ROWS[:3], f"{ROWS[3]} has a row and no message"),
        ([*ROWS, PHANTOM], f"{PHANTOM} has a message and no row"),
        ([*ROWS[:3], Order("4", "a", 4)], f"{Order('4', 'a', 4)} has a message and no row"),
        ([*ROWS, ROWS[1]], f"{ROWS[1]} has 2 messages"),
        ([ROWS[2], ROWS[0], *ROWS[1:2], ROWS[3]], "the messages of a are [2, 1, 3]"),
    ],
)
def test_a_message_that_is_lost_invented_doubled_or_out_of_order_is_found(
    messages: list[Order], fault: str
) -> None:
    assert fault in faults(TOLD, ROWS, messages)


@pytest.mark.parametrize(
    ("token", "outcome", "fault"),
    [
        ("7", Outcome.COMMITTED, "7 was said to be committed, and has no row"),
        ("4", Outcome.ABORTED, "4 was said to be rolled back, and has a row"),
    ],
)
def test_a_producer_that_was_told_wrong_is_found(token: str, outcome: Outcome, fault: str) -> None:
    assert faults(TOLD | {token: outcome}, ROWS, ROWS) == [fault]


def test_a_row_of_nobody_and_a_version_that_is_missing_are_found() -> None:
    more = [*ROWS, Order("9", "c", 2)]
    assert faults(TOLD, more, more) == [
        "9 was never begun",
        "the rows of c are [2]",
        "the messages of c are [2]",
    ]


def test_a_hit_that_ended_otherwise_than_it_must_is_found() -> None:
    assert misjudged({"1": True, "6": False}, ROWS) == []
    assert misjudged({"1": False, "6": True}, ROWS) == ["1 has a row", "6 lacks a row"]


def test_sound_effects_are_left_alone() -> None:
    assert wrong_effects(ROWS, ROWS, in_order=True) == []
    assert wrong_effects(ROWS, ROWS[::-1], in_order=False) == []


@pytest.mark.parametrize(
    ("effects", "fault"),
    [
        (ROWS[1:], f"{ROWS[0]} had no effect"),
        ([*ROWS, PHANTOM], f"{PHANTOM} had an effect and was not sent"),
        ([*ROWS, ROWS[2]], f"{ROWS[2]} had 2 effects"),
    ],
)
def test_an_effect_that_is_missing_invented_or_doubled_is_found(
    effects: list[Order], fault: str
) -> None:
    assert wrong_effects(ROWS, effects, in_order=False) == [fault]


def test_effects_out_of_order_are_found() -> None:
    assert wrong_effects(ROWS, ROWS[::-1], in_order=True) == ["the messages of a are [3, 2, 1]"]
