"""Clean-up of replay plans: letters that are lost are ended, rows that are out of date
are swept, and deleted plans are removed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.plans import PlanAbandonedSwept, PlanLettersLost, PlanSwept, PlanTidied
from txmq.core.replay import putting_back
from txmq.core.replay.putting_back import AdvanceReply
from txmq.core.state import failed_changes, failed_messages, plan_letters
from txmq.core.state.failed_rows import CLOSED
from txmq.core.state.plans import RUNNING, LetterOutcome, Plan, PlanState
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State

STEP_ROWS = 1_000  # read, changed or removed by one record
SWEPT_LETTERS = 64  # processed ones, of one record: about a millisecond
SWEPT_ABANDONED = 100  # likewise, but each gets another row and other places: about 6 ms


class EndLostLetters(NamedTuple):
    """End letters of a plan that were put back and will not be delivered: they wait for
    a dead letter of their key, or the log has lost what became of them. `after` is the
    key of the letter to go on behind.
    """

    plan_id: int
    after: bytes = b""


class LostReply(NamedTuple):
    """The key to go on behind; None = all letters were looked at."""

    following: bytes | None = None


class SweepPlan(NamedTuple):
    """Remove rows of letters of a plan that are processed, or change those of abandoned
    ones.
    """

    plan_id: int


class TidyPlan(NamedTuple):
    """Remove the next letters of a deleted plan."""

    plan_id: int


def what_may_be_lost(state: State, plan: Plan) -> tuple[int, ...] | None:
    """Return numbers that change whenever other letters of the plan may be lost: put
    back, and never to be delivered. None = no letter can be.
    """
    group = state.groups.by_id.get(plan.group_id)
    if group is None or not plan.count(LetterOutcome.DELIVERED):
        return None
    # letters of a group that skips dead letters have no fence
    waits = plan.state not in RUNNING or putting_back.room(plan) <= 0
    may_wait = waits and group.ordered and group.letters > 0 and bool(group.fences)
    if not (may_wait or state.lost_log_end):
        return None
    return group.next_letter if may_wait else 0, state.lost_log_end


def decide_end_lost(state: State, command: EndLostLetters, _now: int) -> Outcome:
    plan = state.plans.by_id.get(command.plan_id)
    if plan is None or plan.state is PlanState.DELETED or what_may_be_lost(state, plan) is None:
        return Outcome(reply=LostReply())
    group = state.groups.by_id[plan.group_id]
    found = list(islice(plan_letters.letters_of(state, plan.plan_id, command.after), STEP_ROWS))
    lost = tuple(
        (*placed.ref, placed.visible_at, why)
        for placed in found
        if placed.letter.outcome == LetterOutcome.DELIVERED
        and (why := _reason_of_end(state, plan, group, placed.ref))
    )
    reply = LostReply(found[-1].key if len(found) == STEP_ROWS else None)
    event = PlanLettersLost(plan.plan_id, plan.group_id, lost)
    return Outcome((event,) if lost else (), reply)


def _reason_of_end(state: State, plan: Plan, group: ConsumerGroup, ref: MessageRef) -> str:
    """Return why a letter that was put back will not be delivered; "" = it will."""
    row = failed_messages.get(state, group, ref)
    if row is None or row.plan != plan.plan_id or row.kind in CLOSED:
        return "the log has lost what became of it"
    head = FailureChanges(state, group, 0).dead_head(ref, row.key_hash)
    return "" if head is None else failures.behind(state, head)


def decide_sweep(state: State, command: SweepPlan, _now: int) -> Outcome:
    plan = state.plans.by_id.get(command.plan_id)
    if plan is None or not plan.has_unswept:
        return Outcome(reply=AdvanceReply(0))
    if not plan.unswept:
        return _sweep_abandoned(state, plan)
    chunks: list[tuple[int, int, int]] = []
    letters = 0
    for chunk, count in plan.unswept.items():
        if chunks and letters + count > SWEPT_LETTERS:
            break
        chunks.append(chunk)
        letters += count
    event = PlanSwept(plan.plan_id, plan.group_id, tuple(chunks))
    return Outcome((event,), AdvanceReply(letters, more=len(chunks) < len(plan.unswept)))


def _sweep_abandoned(state: State, plan: Plan) -> Outcome:
    rows = plan_letters.rows_of(state, plan.plan_id, plan.swept, plan.abandoned)
    keys = [key for key, _row in islice(rows, SWEPT_ABANDONED)]
    cursor = keys[-1] if len(keys) == SWEPT_ABANDONED else plan.abandoned
    event = PlanAbandonedSwept(plan.plan_id, plan.group_id, cursor)
    return Outcome((event,), AdvanceReply(len(keys), more=cursor < plan.abandoned))


def decide_tidy(state: State, command: TidyPlan, now: int) -> Outcome:
    plan = state.plans.by_id.get(command.plan_id)
    if plan is None or plan.state is not PlanState.DELETED:
        return Outcome(reply=AdvanceReply(0))
    if plan.has_unswept:  # it says what these are
        swept = decide_sweep(state, SweepPlan(plan.plan_id), now)
        return swept._replace(reply=AdvanceReply(0, more=True))
    return Outcome((PlanTidied(plan.plan_id, STEP_ROWS),), AdvanceReply(0, more=True))


def apply_lost(state: State, event: PlanLettersLost, _context: RecordContext) -> None:
    plan, group = state.plans.by_id[event.plan_id], state.groups.by_id[event.group_id]
    putting_back.leave(state, plan, group, event.letters, LetterOutcome.ENDED)


def apply_swept(state: State, event: PlanSwept, _context: RecordContext) -> None:
    plan = state.plans.by_id[event.plan_id]
    for topic_id, partition, number in event.chunks:
        _sweep_chunk(state, plan, (topic_id, partition, number))


def _sweep_chunk(state: State, plan: Plan, chunk: tuple[int, int, int]) -> None:
    for ref in plan_letters.unswept(state, plan, chunk):
        failed_changes.sweep(state, plan.group_id, ref)
    plan_letters.set_swept(state, plan, chunk)


def apply_abandoned_swept(state: State, event: PlanAbandonedSwept, _context: RecordContext) -> None:
    plan = state.plans.by_id[event.plan_id]
    for ref in plan_letters.untouched(state, plan.plan_id, plan.swept, event.cursor):
        failed_changes.sweep(state, event.group_id, ref)
    plan.swept = event.cursor
    state.plans.dirty.add(plan.plan_id)


def apply_tidied(state: State, event: PlanTidied, _context: RecordContext) -> None:
    plan = state.plans.by_id[event.plan_id]
    for chunk in list(plan.unswept):  # the log has lost that they were swept
        _sweep_chunk(state, plan, chunk)
    group = state.groups.find(plan.group_id)
    letters = list(islice(plan_letters.letters_of(state, plan.plan_id), event.most))
    for placed in letters:
        if group is not None and placed.letter.outcome == LetterOutcome.DELIVERED:
            failed_changes.leave_plan(state, group, placed.ref, plan.plan_id)
        elif plan.swept < placed.key <= plan.abandoned:  # likewise
            failed_changes.sweep(state, plan.group_id, placed.ref)
        state.tables[t.PLAN_LETTERS].delete(placed.key)
    if len(letters) < event.most and plan_letters.forget_done(state, plan, event.most):
        state.plans.remove(plan)


DECIDERS: Deciders = {
    EndLostLetters: decide_end_lost,
    SweepPlan: decide_sweep,
    TidyPlan: decide_tidy,
}
APPLIERS: Appliers = {
    PlanLettersLost: apply_lost,
    PlanSwept: apply_swept,
    PlanAbandonedSwept: apply_abandoned_swept,
    PlanTidied: apply_tidied,
}
