"""Letters of a plan that are abandoned together, in steps of the broker, and letters
that leave a plan before.

A plan that was never started holds its letters: nobody else may replay or edit them. An
operator who needs them no more has the broker abandon them. It goes through them as it
puts letters back: each record moves the cursor over the next ones. The reason is that
of the order, and no record names a letter.

From then on everybody sees them as abandoned. What is stored of each says so later
(`cleanup.decide_sweep`): to change it takes much longer than to pass it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures, key_fences
from txmq.core.consumers.commands import TopicOffset
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.plans import PlanLettersAbandoned, PlanLettersLeft, PlanMoved
from txmq.core.replay import orders, putting_back
from txmq.core.replay.orders import PlanReply, find_plan, state_name
from txmq.core.replay.putting_back import STEP_LETTERS, AdvanceReply, reason_to_skip
from txmq.core.state import failed_messages, passed_letters, plan_letters
from txmq.core.state.plans import LetterOutcome, PlanState
from txmq.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.events.plans import SkippedLetter
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.plan_letters import PlacedLetter
    from txmq.core.state.plans import Plan
    from txmq.core.state.state import State

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


def decide_order(state: State, command: AbandonPlan, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if plan.state is PlanState.ABANDONING or (plan.state is PlanState.DONE and plan.abandons):
        return Outcome(reply=PlanReply(plan.name, state_name(plan)))
    if not command.reason:
        raise BadRequest(NO_REASON, hint="name a reason: it is stored with each letter")
    if plan.state is not PlanState.PLANNED:
        hint = "only a plan whose letters are fixed, and that was never started, can abandon them"
        raise orders.refused(plan, "abandon the letters of", hint)
    reason = failures.cut_reason(command.reason)
    return orders.moves(plan, PlanMoved(plan.plan_id, PlanState.ABANDONING, reason, command.by))


def decide_leave(state: State, command: LeavePlan, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if not command.reason:
        raise BadRequest(NO_REASON, hint="name a reason: the plan tells it")
    if plan.state is not PlanState.PLANNED:
        message = f"letters cannot leave plan {plan.name!r}: it is {state_name(plan)}"
        raise Conflict(message, hint="cancel the plan: what it has not put back is free then")
    group, why = state.groups.by_id[plan.group_id], command.reason[: orders.MAX_REASON]
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
    group = state.groups.by_id[plan.group_id]
    passed = _PassedLetters(state, plan, group, now)
    cursor = plan.cursor
    for placed in islice(plan_letters.letters_of(state, plan.plan_id, cursor), STEP_LETTERS):
        cursor = placed.key
        passed.pass_letter(placed)
    if cursor == plan.cursor:
        return Outcome((PlanMoved(plan.plan_id, PlanState.DONE, plan.why, ""),), AdvanceReply(0))
    ids = (plan.plan_id, group.group_id)
    moves, fences = passed.changes.fields()
    skipped = tuple(passed.skipped)
    event = PlanLettersAbandoned(*ids, cursor, passed.letters, moves, fences, skipped)
    return Outcome((event,), AdvanceReply(passed.letters, more=True))


class _PassedLetters:
    """The letters that one record abandons."""

    def __init__(self, state: State, plan: Plan, group: ConsumerGroup, now: int) -> None:
        self._state, self._plan, self._group = state, plan, group
        self.changes = FailureChanges(state, group, now)
        self.skipped: list[SkippedLetter] = []
        self.letters = 0

    def pass_letter(self, placed: PlacedLetter) -> None:
        """Abandon a letter, or skip it, unless it has its outcome."""
        if placed.letter.outcome != LetterOutcome.PLANNED:
            return
        row = failed_messages.get(self._state, self._group, placed.ref)
        if why := reason_to_skip(self._state, self._plan, placed, row):
            self.skipped.append((*placed.ref, placed.visible_at, why))
            return
        assert row is not None, "there is no reason to skip it"
        self.changes.processed(placed.ref, row.key_hash)
        self.letters += 1


def apply_abandoned(state: State, event: PlanLettersAbandoned, context: RecordContext) -> None:
    plan, group = state.plans.by_id[event.plan_id], state.groups.by_id[event.group_id]
    putting_back.leave(state, plan, group, event.skipped, LetterOutcome.SKIPPED)
    passed = plan_letters.untouched(state, plan.plan_id, plan.cursor, event.cursor)
    passed_letters.abandon(state, group, plan.plan_id, passed)
    plan.cursor = plan.abandoned = event.cursor
    plan.reason = plan.why
    plan_letters.count_passed(state, plan, len(passed), LetterOutcome.ENDED)
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)


def apply_left(state: State, event: PlanLettersLeft, _context: RecordContext) -> None:
    plan, group = state.plans.by_id[event.plan_id], state.groups.by_id[event.group_id]
    putting_back.leave(state, plan, group, event.letters, LetterOutcome.SKIPPED)


DECIDERS: Deciders = {
    AbandonPlan: decide_order,
    LeavePlan: decide_leave,
    AbandonNextLetters: decide_step,
}
APPLIERS: Appliers = {
    PlanLettersAbandoned: apply_abandoned,
    PlanLettersLeft: apply_left,
}
