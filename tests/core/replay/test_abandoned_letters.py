"""Letters that plans have abandoned: everybody sees it at once, rows change later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.core.consumers.invariants import check_indexes, check_letter_index, moved_rows
from tests.core.consumers.world import rows
from tests.core.replay.world import PlansWorld
from txmq.core import machine
from txmq.core.consumers.commands import (
    AdvanceGroupWork,
    DeleteGroup,
    LeaveGroup,
    ReplayLetters,
    ResetPosition,
)
from txmq.core.consumers.letter_exports import NoteExported
from txmq.core.consumers.letter_selection import LetterScan, LetterSelection
from txmq.core.events.plans import PlanTidied
from txmq.core.replay import abandoning, cleanup
from txmq.core.replay.abandoning import AbandonNextLetters, AbandonPlan
from txmq.core.replay.cleanup import SweepPlan
from txmq.core.replay.orders import CancelPlan, DeletePlan
from txmq.core.replay.putting_back import AdvanceReply
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.letter_cells import SLOT, LetterState
from txmq.model.units import DAY

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def world() -> PlansWorld:
    return PlansWorld(1)


def abandon(world: PlansWorld, name: str, *places: Any) -> int:
    """Let a plan abandon letters; return its id."""
    world.create(name, *places)
    world.do(AbandonPlan(name, "sent again", "ada"))
    plan_id = world.plan_of(name).plan_id
    while world.do(AbandonNextLetters(plan_id)).more:
        pass
    return plan_id


def selected(world: PlansWorld, *states: LetterState) -> list[int]:
    found, _next = world.page(LetterSelection(states), None, 100)
    return [ref[2] for ref, _number in found]


def check(world: PlansWorld) -> None:
    group, failed = world.group(), moved_rows(world.state, world.group())
    check_indexes(world.state, group, failed)
    check_letter_index(world.state, group, failed)
    world.check_plans()


def test_everybody_sees_at_once_what_the_rows_say_later(world: PlansWorld) -> None:
    places = world.letters(0, 5, None, 7)
    before = rows(world.state)
    plan_id = abandon(world, "p", *places[:3])
    after = rows(world.state)
    assert after["letter_index"] == before["letter_index"]
    assert world.outcomes("p") == {"ended": 3}
    assert world.group().letters == 1
    for _ in range(2):
        assert selected(world, LetterState.OPEN) == [3]
        assert selected(world, LetterState.ABANDONED) == [0, 1, 2]
        assert selected(world, *LetterState) == [0, 1, 2, 3]
        found = {ref[2]: (row.kind, row.reason, row.plan) for ref, row in world.rows().items()}
        assert found[0] == found[2] == (FailedKind.ABANDONED, "sent again", 0)
        assert world.do(ReplayLetters("g", (places[0],))).refused[0][-1] == "abandoned"
        check(world)
        machine.save(world.state)
        loaded = machine.load(world.state.tables)
        assert loaded.plans == world.state.plans
        world.do(SweepPlan(plan_id))
    assert not world.plan_of("p").has_unswept
    assert rows(world.state)["letter_index"] != before["letter_index"]
    assert world.do(SweepPlan(plan_id)) == AdvanceReply(0)


def test_a_sweep_goes_in_steps_also_where_the_plan_was_cancelled(
    world: PlansWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoning, "STEP_LETTERS", 64)
    monkeypatch.setattr(cleanup, "SWEPT_ABANDONED", 30)
    world.create("p", *world.letters(*[None] * 100))
    world.do(AbandonPlan("p", "sent again"))
    plan_id = world.plan_of("p").plan_id
    assert world.do(AbandonNextLetters(plan_id)) == AdvanceReply(64, more=True)
    world.do(CancelPlan("p"))
    replies = [world.do(SweepPlan(plan_id)) for _ in range(4)]
    assert replies == [
        AdvanceReply(30, more=True), AdvanceReply(30, more=True), AdvanceReply(4), AdvanceReply(0)
    ]  # fmt: skip
    assert {row.reason for row in world.rows().values() if row.kind == FailedKind.ABANDONED} == {
        "sent again"
    }
    assert world.outcomes("p") == {"planned": 36, "ended": 64}
    assert len(selected(world, LetterState.OPEN)) == 36
    check(world)
    assert rows(world.replayed()) == rows(world.state)


def test_a_page_leaps_over_letters_that_are_abandoned(world: PlansWorld) -> None:
    for _slot in range(6):
        abandon(world, f"p{world.now}", *world.letters(*[None] * 100))
        world.now += SLOT
    world.letters(0)
    scan = LetterScan(world.state, world.group(), LetterSelection(), None, world.now)
    found = 0
    while not scan.ended:
        found += len(list(scan.step()))
    assert found == 1
    assert scan.examined < 50, "of 601, and of two slots"


def export(world: PlansWorld, places: Any) -> None:
    row = world.rows()[1, 0, 0]
    world.do(NoteExported("g", ((*places[0], row.number, row.edits),), "ada"))
    assert world.rows()[1, 0, 0].exported


def expire(world: PlansWorld, places: Any) -> None:
    del places
    world.now += 30 * DAY
    world.do(ExpireLetters(world.group().group_id, 0, DAY))


def reset(world: PlansWorld, places: Any) -> None:
    del places
    world.do(ResetPosition("g", "a", "first"))
    while world.do(AdvanceGroupWork()).more:
        pass


@pytest.mark.parametrize("change", [export, expire, reset])
def test_a_letter_that_changes_is_swept_before(
    world: PlansWorld, change: Callable[[PlansWorld, Any], None]
) -> None:
    places = world.letters(0, 5)
    plan_id = abandon(world, "p", *places)
    change(world, places)
    check(world)
    world.do(SweepPlan(plan_id))
    check(world)
    assert world.outcomes("p") == {"ended": 2}
    assert rows(world.replayed()) == rows(world.state)


def test_a_deleted_plan_is_swept_first(world: PlansWorld) -> None:
    plan_id = abandon(world, "p", *world.letters(0, 5, None))
    world.do(DeletePlan("p"))
    world.tidy(plan_id)
    assert not rows(world.state)["plan_letters"]
    assert selected(world, LetterState.ABANDONED) == [0, 1, 2]
    check(world)


def test_a_deleted_plan_is_swept_though_the_log_has_lost_that(world: PlansWorld) -> None:
    plan_id = abandon(world, "p", *world.letters(0, 5, None))
    world.do(DeletePlan("p"))
    plan = world.state.plans.by_id[plan_id]
    context = world.log[-1][0]
    tidied = PlanTidied(plan_id, 10)
    assert plan.has_unswept
    machine.apply(world.state, tidied, context)
    assert not rows(world.state)["plan_letters"]
    assert selected(world, LetterState.ABANDONED) == [0, 1, 2]
    check(world)


def test_a_deleted_group_leaves_nothing_of_them(world: PlansWorld) -> None:
    plan_id = abandon(world, "p", *world.letters(0, 5, None))
    world.do(LeaveGroup("g", "m", "m"))
    world.do(DeleteGroup("g"))
    while world.do(AdvanceGroupWork()).more:
        pass
    assert world.do(SweepPlan(plan_id)).letters == 3
    left = rows(world.state)
    for name in ("failed", "letters", "letter_index", "letter_cells"):
        assert not left[name], name
