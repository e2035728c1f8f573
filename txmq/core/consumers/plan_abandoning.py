"""Letters of a plan that are abandoned together, in steps of the broker, and letters
that leave a plan before.

A plan that was never started holds its letters: nobody else may replay or edit them. An
operator who needs them no more has the broker abandon them. It goes through them as it
puts letters back: each record moves the cursor over the next ones. The reason is that
of the order, and no record names a letter.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import failures, key_fences, plan_steps, plans
from txmq.core.consumers.commands import TopicOffset
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.consumers.plan_steps import AdvanceReply, reason_to_skip
from txmq.core.consumers.plans import PlanReply, find_plan, state_name
from txmq.core.events.outcome import Appliers, Deciders, Outcome, Rejected
from txmq.core.events.plans import PlanLettersAbandoned, PlanLettersLeft, PlanMoved
from txmq.core.state import failed_messages, plan_blocks, plan_letters
from txmq.core.state.plans import LetterOutcome, PlanState
from txmq.errors import BadRequest, Conflict
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.events.plans import SkippedLetter
    from txmq.core.state.state import State

STEP_LETTERS = 400  # abandoned by one record: about 10 ms
NO_REASON = "letters cannot be abandoned or left without a reason"


class AbandonPlan(NamedTuple):
    """Abandon all letters of a plan that was never started."""

    name: str
    reason: str
    by: str = ""


class LeavePlan(NamedTuple):
    """Take letters out of a plan that was not started: they stay dead letters, which
    anybody may replay. Those that the plan does not hold are passed over.
    """

    name: str
    letters: tuple[TopicOffset, ...]
    reason: str


class LeftReply(NamedTuple):
    """Number of letters that left the plan."""

    left: int


class AbandonNextLetters(NamedTuple):
    """Abandon the next letters of a plan that is to abandon them."""

    plan_id: int


def decide_order(state: State, command: AbandonPlan, now: int) -> Outcome | Rejected:
    del now
    plan = find_plan(state, command.name)
    if isinstance(plan, Rejected):
        return plan
    if plan.state is PlanState.ABANDONING or (plan.state is PlanState.DONE and plan.abandons):
        return Outcome(reply=PlanReply(plan.name, state_name(plan)))
    if not command.reason:
        return Rejected(BadRequest, NO_REASON, "name a reason: it is stored with each letter")
    if plan.state is not PlanState.PLANNED:
        hint = "only a plan whose letters are fixed, and that was never started, can abandon them"
        return plans.refused(plan, "abandon the letters of", hint)
    reason = failures.cut_reason(command.reason)
    return plans.moves(plan, PlanMoved(plan.plan_id, PlanState.ABANDONING, reason, command.by))


def decide_leave(state: State, command: LeavePlan, now: int) -> Outcome | Rejected:
    del now
    plan = find_plan(state, command.name)
    if isinstance(plan, Rejected):
        return plan
    if not command.reason:
        return Rejected(BadRequest, NO_REASON, "name a reason: the plan tells it")
    if plan.state is not PlanState.PLANNED:
        message = f"letters cannot leave plan {plan.name!r}: it is {state_name(plan)}"
        return Rejected(Conflict, message, "cancel the plan: what it has not put back is free then")
    group, why = state.groups.by_id[plan.group_id], command.reason[: plan_steps.MAX_REASON]
    left: list[SkippedLetter] = []
    for place in dict.fromkeys(command.letters):
        ref, row = failures.find_message(state, group, *place)
        if ref is None or row is None or row.plan != plan.plan_id:
            continue
        letter = plan_letters.get(state, plan_letters.key_of(plan.plan_id, row.visible_at, ref))
        if letter is not None and letter.outcome == LetterOutcome.PLANNED:
            left.append((*ref, row.visible_at, why))
    event = PlanLettersLeft(plan.plan_id, plan.group_id, tuple(left))
    return Outcome((event,) if left else (), LeftReply(len(left)))


def decide_step(state: State, command: AbandonNextLetters, now: int) -> Outcome:
    plan = state.plans.by_id.get(command.plan_id)
    if plan is None or plan.state is not PlanState.ABANDONING:
        return Outcome(reply=AdvanceReply(0))
    found = list(islice(plan_letters.letters_of(state, plan.plan_id, plan.cursor), STEP_LETTERS))
    if not found:
        return Outcome((PlanMoved(plan.plan_id, PlanState.DONE, plan.why, ""),), AdvanceReply(0))
    group = state.groups.by_id[plan.group_id]
    changes = FailureChanges(state, group, now)
    skipped: list[SkippedLetter] = []
    letters = 0
    for placed in found:
        if placed.letter.outcome != LetterOutcome.PLANNED:
            continue
        row = failed_messages.planned(state, group, placed.ref, plan.plan_id)
        if why := reason_to_skip(state, plan, placed, row):
            skipped.append((*placed.ref, placed.visible_at, why))
            continue
        assert row is not None, "there is no reason to skip it"
        changes.processed(placed.ref, row.key_hash)
        letters += 1
    ids = (plan.plan_id, group.group_id)
    event = PlanLettersAbandoned(*ids, found[-1].key, letters, *changes.parts(), tuple(skipped))
    return Outcome((event,), AdvanceReply(letters, more=True))


def apply_abandoned(state: State, event: PlanLettersAbandoned, context: RecordContext) -> None:
    plan, group = state.plans.by_id[event.plan_id], state.groups.by_id[event.group_id]
    plan_steps.leave(state, plan, group, event.skipped, LetterOutcome.SKIPPED)
    passed: list[Any] = [
        t.PLAN_LETTER_KEY.unpack(key)[2:]
        for key, letter in plan_letters.rows_of(state, plan.plan_id, plan.cursor, event.cursor)
        if letter[0] == LetterOutcome.PLANNED
    ]
    plan_blocks.remove_passed(state, plan, event.cursor)
    plan.cursor = event.cursor
    plan_letters.count_passed(state, plan, len(passed), LetterOutcome.ENDED)
    failed_messages.abandon(state, group, plan.plan_id, passed, plan.why)
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)


def apply_left(state: State, event: PlanLettersLeft, context: RecordContext) -> None:
    del context
    plan, group = state.plans.by_id[event.plan_id], state.groups.by_id[event.group_id]
    plan_steps.leave(state, plan, group, event.letters, LetterOutcome.SKIPPED)


DECIDERS: Deciders = {
    AbandonPlan: decide_order,
    LeavePlan: decide_leave,
    AbandonNextLetters: decide_step,
}
APPLIERS: Appliers = {
    PlanLettersAbandoned: apply_abandoned,
    PlanLettersLeft: apply_left,
}
