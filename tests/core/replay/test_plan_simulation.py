"""Simulation of replay plans among consumers that fail: many seeds, and planted bugs
that the checks have to find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.core.consumers.simulator import run_steps, shorten_pauses
from tests.core.replay.simulated_plans import PlanningSim
from txmq.core import machine
from txmq.core.consumers import failures, group_redrives
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.replay import abandoning, policies, putting_back
from txmq.core.state import failed_changes, letter_index, passed_letters, plan_letters
from txmq.core.state.failed_rows import FailedMessage
from txmq.core.state.plans import RUNNING, PlanState
from txmq.core.state.put_back import PutBackQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.core.state.state import State
    from txmq.model.topic_partition import TopicPartition

STEPS = 800
SEEDS = 8
BUG_SEEDS = 40
# Of some bugs: seeds that soon find them, as in test_simulation.
FIRST_SEEDS = {
    "letters_leave_a_plan_that_keeps_them": 26,
    "messages_under_way_are_given": 21,
    "a_policy_does_not_wait": 16,
    "an_ack_tells_no_plan": 18,
    "a_second_death_keeps_the_plan": 18,
    "plans_share_letters": 2,
    "the_canary_has_no_end": 28,
    "a_letter_is_put_back_again": 10,
    "a_replay_leaves_the_plan_of_a_letter": 18,
    "a_letter_of_a_fenced_key_is_put_back": 18,
    "a_reset_tells_that_it_processed": 32,
}


def run(seed: int) -> PlanningSim:
    sim = PlanningSim(seed)
    run_steps(sim, seed, STEPS)
    assert sim.replayed().plans == sim.state.plans
    assert queues(sim.replayed()) == queues(sim.state)
    loaded = machine.load(sim.state.tables)
    assert loaded.plans == sim.state.plans
    assert {at: {*waiting} for at, waiting in queues(loaded).items()} == {
        at: {*waiting} for at, waiting in queues(sim.state).items()
    }
    sim.drain()
    sim.check()
    return sim


def queues(state: State) -> dict[tuple[int, TopicPartition], list[int]]:
    """Return the letters that wait to be delivered again, because of plans."""
    return {
        (group.group_id, tp): [*queue]
        for group in state.groups.by_id.values()
        for tp, queue in group.put_back.items()
    }


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_letter_of_a_plan_is_in_one_place_and_has_one_outcome(seed: int) -> None:
    run(seed)


def an_ack_tells_no_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan_letters, "ended", lambda *_: None)


def a_second_death_keeps_the_plan(patch: pytest.MonkeyPatch) -> None:
    died = plan_letters.died
    patch.setattr(plan_letters, "died", lambda *args: died(*args) and False)


def plans_share_letters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failures, "held_reason", lambda *_: "")


def a_cancelled_plan_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(putting_back, "RUNNING", (*RUNNING, PlanState.CANCELLED))


def the_canary_has_no_end(patch: pytest.MonkeyPatch) -> None:
    room = putting_back.room

    def wide(plan: Any) -> int:
        return room(plan) if plan.state is not PlanState.CANARY else plan.counts.get(1, 0)

    patch.setattr(putting_back, "room", wide)


def a_letter_is_put_back_again(patch: pytest.MonkeyPatch) -> None:
    """What was put back and died again is planned once more."""

    def died(state: Any, plan_id: int, visible_at: int, ref: Any, *_: Any) -> bool:
        plan = state.plans.by_id.get(plan_id)
        key = plan_letters.key_of(plan_id, visible_at, ref)
        letter = plan_letters.get(state, key)
        if plan is None or letter is None or letter.outcome != 2:
            return False
        row = letter._replace(outcome=1)
        plan_letters.change(state, plan, key, row)
        plan.cursor = b""
        return False

    patch.setattr(plan_letters, "died", died)
    patch.setattr(putting_back, "reason_to_skip", lambda *_: "")


def a_replay_leaves_the_plan_of_a_letter(patch: pytest.MonkeyPatch) -> None:
    drop = failed_changes.drop

    def forgetful(*args: Any) -> FailedMessage | None:
        row = drop(*args)
        return None if row is None else row._replace(plan=0)

    patch.setattr(failed_changes, "drop", forgetful)


def a_put_back_letter_is_forgotten_with_its_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failed_changes, "leave_plan", lambda *_: None)


def a_start_forgets_what_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(passed_letters, "load_queues", lambda *_: None)
    patch.setattr(PutBackQueue, "discard", lambda *_: None)


def a_letter_stays_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(passed_letters, "take_from_queue", lambda *_: True)


def what_is_processed_is_seen_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan_letters, "is_unswept", lambda *_: False)


def a_letter_of_a_fenced_key_is_put_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FailureChanges, "put_back", lambda *_: None)


def a_reset_tells_that_it_processed(patch: pytest.MonkeyPatch) -> None:
    remove = failed_changes.remove
    patch.setattr(failed_changes, "remove", lambda *args: remove(*args[:3]))


def a_policy_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policies, "is_busy", lambda *_: False)


def messages_under_way_are_given(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(group_redrives, "_place_in", lambda *_: "")


def an_abandoned_letter_stays_among_the_open_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(letter_index, "move", lambda *_: None)


def what_waits_behind_an_abandoned_letter_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(abandoning, "FailureChanges", _Fenceless)


class _Fenceless(FailureChanges):
    def processed(self, *_: Any) -> None: ...


def what_a_plan_closes_stays_unprocessed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(passed_letters, "_count_closed", lambda *_: None)


def letters_leave_a_plan_that_keeps_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failed_changes, "leave_plan", lambda *_: None)


@pytest.mark.parametrize(
    "bug",
    [
        an_abandoned_letter_stays_among_the_open_ones,
        what_waits_behind_an_abandoned_letter_stays,
        letters_leave_a_plan_that_keeps_them,
        messages_under_way_are_given,
        a_policy_does_not_wait,
        an_ack_tells_no_plan,
        a_second_death_keeps_the_plan,
        plans_share_letters,
        a_cancelled_plan_goes_on,
        the_canary_has_no_end,
        a_letter_is_put_back_again,
        a_replay_leaves_the_plan_of_a_letter,
        a_put_back_letter_is_forgotten_with_its_plan,
        a_start_forgets_what_waits,
        a_letter_stays_in_the_queue,
        a_letter_of_a_fenced_key_is_put_back,
        a_reset_tells_that_it_processed,
        what_is_processed_is_seen_again,
        what_a_plan_closes_stays_unprocessed,
    ],
)
def test_a_planted_bug_of_plans_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    first = FIRST_SEEDS.get(bug.__name__, 0)
    for seed in range(first, first + BUG_SEEDS):
        try:
            run(seed)
        except AssertionError:
            return
    pytest.fail("the simulation is blind to this bug")
