"""Letters that plans have put back: their rows stay, and everybody sees retries."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.plans_world import PlansWorld
from tests.core.consumers.world import rows
from txmq.core import machine
from txmq.core.consumers.letter_selection import LetterSelection
from txmq.core.consumers.letter_views import list_letters
from txmq.core.consumers.plan_steps import AdvancePlan
from txmq.core.consumers.plans import CancelPlan, DeletePlan, StartPlan
from txmq.core.events.outcome import Rejected
from txmq.core.events.plans import PlanAdvanced
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.state import failed_messages
from txmq.core.state.failed_messages import FailedKind, Move
from txmq.core.state.letter_index import LetterState
from txmq.core.state.put_back import TRIMMED_AT, PutBackQueue
from txmq.model.units import DAY


@pytest.fixture
def world() -> PlansWorld:
    return PlansWorld(1)


def selected(world: PlansWorld, *states: LetterState) -> list[int]:
    """Return the offsets of the letters in these states."""
    found, _next = world.page(LetterSelection(states), None, 100)
    return [ref[2] for ref, _number in found]


def test_putting_back_writes_no_row_of_a_letter(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, None, 7))
    before = rows(world.state)
    world.run_plan("p", most=2)
    after = rows(world.state)
    for name in ("moved", "letters", "letter_index", "plan_letters", "retries", "wakes"):
        assert after[name] == before[name], name
    assert {row.kind for row in world.rows().values()} == {FailedKind.RETRY}
    world.check_plans()


def test_lists_and_counts_see_retries(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, None, 7))
    plan = world.plan_of("p")
    world.do(StartPlan("p"))
    world.do(AdvancePlan(plan.plan_id, 3))
    assert selected(world, LetterState.OPEN) == [3]
    assert selected(world, LetterState.REPLAYING) == [0, 1, 2]
    assert selected(world, LetterState.REPLAYING, LetterState.OPEN) == [0, 1, 2, 3]
    assert world.group().letters == 1
    listed = list_letters(world.state, "g", 0, 10)
    assert not isinstance(listed, Rejected)
    assert [letter.fields["offset"] for letter in listed[0]] == [3]
    world.now += 9 * DAY
    world.do(ExpireLetters(1, 0, DAY))
    assert [ref[2] for ref in world.rows()] == [0, 1, 2], "what is replayed does not expire"
    world.check_plans()


def test_a_start_finds_what_waits(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, None, 7))
    world.run_plan("p")
    assert [one.offset for one in world.fetch("m", most=4)] == [0, 1]  # half of a fetch
    machine.save(world.state)
    loaded = machine.load(world.state.tables)
    group = loaded.groups.by_name["g"]
    assert [*group.put_back[next(iter(group.positions))]] == [2, 3]
    assert failed_messages.get(loaded, group, (1, 0, 0)) == world.rows()[1, 0, 0]


def test_what_a_deleted_plan_has_put_back_is_still_delivered(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5))
    world.run_plan("p")
    plan_id = world.plan_of("p").plan_id
    world.do(CancelPlan("p"))
    world.do(DeletePlan("p"))
    world.tidy(plan_id)
    assert plan_id not in world.state.plans.by_id
    assert [(one.offset, one.attempt) for one in world.fetch("m")] == [(0, 1), (1, 1)]
    world.ack("m", (0, 2), topic="a")
    assert not world.rows()


def test_a_record_of_an_older_version_puts_back(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5))
    world.do(StartPlan("p"))
    plan = world.plan_of("p")
    letters = sorted(world.rows().items())
    again: Any = [
        Move(*ref, failed_messages.replayed_row(row)._replace(kind=FailedKind.RETRY, plan=1))
        for ref, row in letters
    ]
    cursor = (1).to_bytes(4) + letters[-1][1].visible_at.to_bytes(8) + b"\xff" * 16
    world.record(PlanAdvanced(plan.plan_id, 1, tuple(again), (), (), cursor))
    assert world.outcomes("p") == {"delivered": 2}
    machine.save(world.state)
    assert not machine.load(world.state.tables).groups.by_name["g"].put_back
    assert [one.offset for one in world.fetch("m")] == [0, 1]
    world.ack("m", (0, 2), topic="a")
    assert world.outcomes("p") == {"processed": 2}
    world.check_plans()


def test_a_letter_that_is_put_back_again_is_in_the_queue_once() -> None:
    queue = PutBackQueue()
    for offset in (1, 2, 3):
        queue.add(offset)
    queue.discard(2)  # it was delivered before the first one, and has died again
    queue.add(2)
    assert ([*queue], len(queue)) == ([1, 3, 2], 3)
    queue.discard(2)
    queue.discard(1)
    assert ([*queue], len(queue)) == ([3], 1)


def test_a_letter_that_left_one_plan_and_is_put_back_by_another_is_delivered(
    world: PlansWorld,
) -> None:
    first, second = world.letters(0, 5)
    for name, place in (("p", first), ("q", second)):
        world.create(name, place)
        world.run_plan(name)
    plan_id = world.plan_of("q").plan_id
    world.do(CancelPlan("q"))
    world.do(DeletePlan("q"))
    world.tidy(plan_id)  # the letter is a retry as any other, and so goes out first
    [got] = world.fetch("m", most=1)
    world.fail(got.topic, got.partition, got.offset, dead=True)
    world.create("r", second)
    world.run_plan("r")
    assert [one.offset for one in world.fetch("m")] == [0, 1]
    world.check_plans()


def test_a_queue_keeps_its_order() -> None:
    queue = PutBackQueue()
    for offset in range(3 * TRIMMED_AT):
        queue.add(offset)
    for offset in (5, *range(1, 5), *range(6, 2 * TRIMMED_AT), 0):
        queue.discard(offset)
    assert [*queue] == [*range(2 * TRIMMED_AT, 3 * TRIMMED_AT)]
    assert len(queue) == TRIMMED_AT
