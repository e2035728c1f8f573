"""The checks of orders find each kind of damage among sound orders."""

from __future__ import annotations

import pytest

from tests.system.orders import (
    PlacedOrder,
    ReportedOutcome,
    find_faults,
    wrong_effects,
    wrongly_ended,
)

ROWS = [
    PlacedOrder("1", "a", 1),
    PlacedOrder("2", "b", 1),
    PlacedOrder("3", "a", 2),
    PlacedOrder("4", "a", 3),
]
REPORTED = {
    "1": ReportedOutcome.COMMITTED,
    "2": ReportedOutcome.BEGAN,
    "3": ReportedOutcome.UNKNOWN,
    "4": ReportedOutcome.COMMITTED,
    "5": ReportedOutcome.ABORTED,
    "6": ReportedOutcome.BEGAN,
    "7": ReportedOutcome.UNKNOWN,
}
PHANTOM = PlacedOrder("6", "b", 2)


def test_sound_orders_have_no_faults() -> None:
    assert find_faults(REPORTED, ROWS, ROWS) == []
    assert find_faults(REPORTED, ROWS, sorted(ROWS, key=lambda order: order.key)) == []
    assert PlacedOrder.decode(ROWS[0].encode()) == ROWS[0]


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (ROWS[:3], f"{ROWS[3]} has a row and no message"),
        ([*ROWS, PHANTOM], f"{PHANTOM} has a message and no row"),
        (
            [*ROWS[:3], PlacedOrder("4", "a", 4)],
            f"{PlacedOrder('4', 'a', 4)} has a message and no row",
        ),
        ([*ROWS, ROWS[1]], f"{ROWS[1]} has 2 messages"),
        ([ROWS[2], ROWS[0], *ROWS[1:2], ROWS[3]], "the messages of a are [2, 1, 3]"),
    ],
)
def test_a_message_that_is_lost_invented_doubled_or_out_of_order_is_found(
    messages: list[PlacedOrder], fault: str
) -> None:
    assert fault in find_faults(REPORTED, ROWS, messages)


@pytest.mark.parametrize(
    ("token", "outcome", "fault"),
    [
        ("7", ReportedOutcome.COMMITTED, "7 was reported as committed, and has no row"),
        ("4", ReportedOutcome.ABORTED, "4 was reported as rolled back, and has a row"),
    ],
)
def test_a_producer_that_got_a_wrong_report_is_found(
    token: str, outcome: ReportedOutcome, fault: str
) -> None:
    assert find_faults(REPORTED | {token: outcome}, ROWS, ROWS) == [fault]


def test_a_row_of_no_transaction_and_a_missing_version_are_found() -> None:
    more = [*ROWS, PlacedOrder("9", "c", 2)]
    assert find_faults(REPORTED, more, more) == [
        "9 was never begun",
        "the rows of c are [2]",
        "the messages of c are [2]",
    ]


def test_a_killed_transaction_with_the_wrong_end_is_found() -> None:
    assert wrongly_ended({"1": True, "6": False}, ROWS) == []
    assert wrongly_ended({"1": False, "6": True}, ROWS) == ["1 has a row", "6 lacks a row"]


def test_sound_effects_have_no_faults() -> None:
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
    effects: list[PlacedOrder], fault: str
) -> None:
    assert wrong_effects(ROWS, effects, in_order=False) == [fault]


def test_effects_out_of_order_are_found() -> None:
    assert wrong_effects(ROWS, ROWS[::-1], in_order=True) == ["the messages of a are [3, 2, 1]"]
