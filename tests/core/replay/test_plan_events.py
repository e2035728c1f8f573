"""The bytes of the events of replay plans and policies, which logs hold for ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from txmq.core.events import base
from txmq.core.events.consumers import FenceChange
from txmq.core.events.plans import (
    PlanAbandonedSwept,
    PlanApproved,
    PlanCreated,
    PlanFrozen,
    PlanLettersAbandoned,
    PlanLettersAdded,
    PlanLettersLeft,
    PlanLettersLost,
    PlanMoved,
    PlanPutBack,
    PlanTidied,
    PolicyPlanned,
    PolicySet,
    PolicyVersionSeen,
)
from txmq.core.state.failed_rows import FailedKind, FailedMessage, Move
from txmq.core.state.plans import Plan, PlanSettings, PlanState

GOLDEN = Path(__file__).parents[2] / "golden" / "plan-events-v1.bin"
ROW = FailedMessage(
    *(FailedKind.RETRY, 0, 5, -7, 4_096, 80, 1, 4_096, 9, "m", "E", "é", "f"),
    plan=3,
    accepted=True,
)
EVENTS = (
    PlanCreated(3, "mend", 7, PlanSettings(rate=0.5, canary=2), '{"error_type":"E"}', "ada: why"),
    PlanLettersAdded(3, ((1, 0, 5, ""), (1, 0, 6, "in plan p")), "00ff", complete=False),
    PlanFrozen(3, "ab" * 32),
    PlanApproved(3, "bob"),
    PlanMoved(3, PlanState.PAUSED, "by an operator", "ada", PlanState.CANARY),
    PlanTidied(3, 1_000),
    PolicySet(7, ("{}", 60_000_000, True, 2, tuple(PlanSettings())), "ada"),
    PolicyVersionSeen(7, "4.2"),
    PlanLettersLost(3, 7, ((1, 0, 5, 4_096, "its topic was deleted"),)),
    PlanPutBack(
        3, 7, b"\0" * 28, 9, (Move(1, 0, 5, ROW),), (FenceChange(1, -7, 1, 0, 5, 9),),
        ((1, 0, 6, 4_096, "abandoned"),),
    ),
)  # fmt: skip


def test_the_events_of_plans_are_those_in_the_golden_file() -> None:
    kinds = [base.KINDS[type(event)] for event in EVENTS]
    assert kinds == [kind for kind in range(128, 139) if kind != 133]  # it was used
    assert b"".join(map(base.encode, EVENTS)) == GOLDEN.read_bytes()
    for event in EVENTS:
        base.decode(base.KINDS[type(event)], base.encode(event))


def test_the_event_of_a_plan_that_a_policy_made() -> None:
    settings = PlanSettings(rate=0.5, canary=2)
    planned = PolicyPlanned(3, "g-auto-3", 7, settings, "{}", "policy: ada", "4.2")
    data = base.encode(planned)
    assert data.hex() == (
        "9703a8672d6175746f2d33079acb3fe0000000000000cb404e00000000000002c2cb3fe000000000000014cd03e8c2c200a27b7dab706f6c6963793a20616461a3342e32"
    )
    assert base.decode(base.KINDS[PolicyPlanned], data) == planned._replace(
        settings=tuple(settings)  # type: ignore[arg-type]  # as it is read
    )


def test_the_events_of_a_plan_that_abandons_its_letters() -> None:
    fence, left = FenceChange(1, -7, 1, 0, 5, 9), (1, 0, 6, 4_096, "not sent")
    abandoned = PlanLettersAbandoned(3, 7, b"\1" * 28, 9, (), (fence,), (left,))
    for event, kind, data in (
        (
            abandoned,
            160,
            "970307c41c010101010101010101010101010101010101010101010101010101010990919601f9010005099195010006cd1000a86e6f742073656e74",
        ),
        (PlanLettersLeft(3, 7, (left,)), 161, "9303079195010006cd1000a86e6f742073656e74"),
        (PlanAbandonedSwept(3, 7, b"\1" * 28), 162, "930307c41c" + "01" * 28),
    ):
        assert base.KINDS[type(event)] == kind
        assert base.encode(event).hex() == data
        base.decode(kind, bytes.fromhex(data))


def test_the_row_of_a_plan_is_read_as_it_was_written() -> None:
    plan = Plan(3, "mend", 7, "g", PlanSettings(most=9), "{}", "ada", 5, recent=("f", ""))
    assert Plan.from_row(3, plan.to_row()) == plan
    abandons = replace(plan, cursor=b"k", abandoned=b"k", swept=b"j", reason="sent")
    assert Plan.from_row(3, abandons.to_row()) == abandons
