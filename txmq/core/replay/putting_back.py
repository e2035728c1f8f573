"""The steps of a running plan: each puts its next letters back, and moves the cursor
behind them.

A timer sets the pace. Each step is decided on the tables alone, and is one record. So a
restart of the broker goes on where the last record ended.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures, key_fences
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.plans import PlanMoved, PlanPutBack, SkippedLetter
from txmq.core.replay.orders import MAX_REASON, pause_of
from txmq.core.state import (
    failed_changes,
    failed_messages,
    failed_rows,
    passed_letters,
    plan_letters,
)
from txmq.core.state.plan_letters import PlacedLetter
from txmq.core.state.plans import CANARY_IS_THROUGH, RUNNING, LetterOutcome, Plan, PlanState
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

STEP_LETTERS = 500  # looked at by one record: 5 to 10 ms
IN_HAND_US = 2 * SECOND  # within which members tell what they have processed
DIED_AGAIN = "it was replayed since, and died again"


class AdvancePlan(NamedTuple):
    """Put back at most so many of the next letters of a running plan."""

    plan_id: int
    most: int


class AdvanceReply(NamedTuple):
    """Number of letters that were put back, abandoned or swept. `more`: there is more
    to do at once.
    """

    letters: int
    more: bool = False


def decide_advance(state: State, command: AdvancePlan, now: int) -> Outcome:
    plan = state.plans.by_id.get(command.plan_id)
    if plan is None or plan.state not in RUNNING:
        return Outcome(reply=AdvanceReply(0))
    moved = next_move(state, plan)
    if moved is not None:
        return Outcome((moved,), AdvanceReply(0, more=moved.state in RUNNING))
    most = min(command.most, room(plan))
    if most <= 0:
        return Outcome(reply=AdvanceReply(0))
    group = state.groups.by_id[plan.group_id]
    changes = FailureChanges(state, group, now)
    skipped: list[SkippedLetter] = []
    planned, cursor = _PlannedLetters(state, plan, group, changes), plan.cursor
    for placed in islice(plan_letters.letters_of(state, plan.plan_id, cursor), STEP_LETTERS):
        if planned.replayed >= most:
            break
        cursor = placed.key
        if why := planned.pass_letter(placed, now):
            skipped.append((*placed.ref, placed.visible_at, why))
    if cursor == plan.cursor:
        why = f"the log has lost {plan.count(LetterOutcome.PLANNED)} of its letters"
        return Outcome((PlanMoved(plan.plan_id, PlanState.CANCELLED, why, ""),), AdvanceReply(0))
    ids = (plan.plan_id, group.group_id)
    event = PlanPutBack(*ids, cursor, planned.replayed, *changes.fields(), tuple(skipped))
    return Outcome((event,), AdvanceReply(planned.replayed, more=True))


class _PlannedLetters:
    """The letters that a plan has not put back yet, and those of them that it puts back
    now. There may be one more than it should: see `failures.put_back`.
    """

    def __init__(
        self, state: State, plan: Plan, group: ConsumerGroup, changes: FailureChanges
    ) -> None:
        self._state, self._plan, self._group = state, plan, group
        self._changes = changes
        self._replayed: set[MessageRef] = set()
        self._row: FailedMessage | None = None

    @property
    def replayed(self) -> int:
        """Number of letters that are put back now."""
        return len(self._replayed)

    def pass_letter(self, placed: PlacedLetter, now: int) -> str:
        """Put back a letter, unless something has become of it; return why it is
        skipped, "" = it is not.
        """
        ref = placed.ref
        if placed.letter.outcome != LetterOutcome.PLANNED or ref in self._replayed:
            return ""
        row = failed_messages.get(self._state, self._group, ref)
        why = reason_to_skip(self._state, self._plan, placed, row)
        if why:
            return why
        assert row is not None, "there is no reason to skip it"
        if self._group.ordered:
            self._row = row
            return failures.put_back(self._state, self._changes, ref, row.key_hash, self, now)
        self._replayed.add(ref)
        return ""

    def has(self, ref: MessageRef) -> bool:
        """Return True if the plan can put this letter back."""
        row = failed_messages.get(self._state, self._group, ref)
        if row is None or ref in self._replayed:
            return False
        key = plan_letters.key_of(self._plan.plan_id, row.visible_at, ref)
        letter = plan_letters.get(self._state, key)
        if letter is None or letter.outcome != LetterOutcome.PLANNED:
            return False
        placed = PlacedLetter(key, ref, row.visible_at, letter)
        return not reason_to_skip(self._state, self._plan, placed, row)

    def replay(self, ref: MessageRef) -> FailedMessage:
        """Return the row of a letter, which is put back now."""
        row = failed_messages.get(self._state, self._group, ref)
        assert row is not None, "the plan can put it back"
        self._replayed.add(ref)
        return failed_rows.replayed_row(row)._replace(plan=self._plan.plan_id)

    def put_back(self, changes: FailureChanges, ref: MessageRef, _now: int) -> None:
        """Add a letter that the cursor passes. Its row changes only where it waits
        behind another message of its key.
        """
        assert self._row is not None, "it was looked at"
        self._replayed.add(ref)
        changes.put_back(ref, self._row)


def next_move(state: State, plan: Plan) -> PlanMoved | None:
    """Return the next state of a running plan; None = it goes on in this one."""
    group = state.groups.by_id[plan.group_id]
    if group.breaker is not None:
        why = f"the group's circuit breaker opened: {group.breaker.fingerprint}"
        return pause_of(plan, why[:MAX_REASON])
    over = not plan.count(LetterOutcome.DELIVERED)
    canary_ends = plan.state is PlanState.CANARY and over and room(plan) <= 0
    ends = over and not plan.count(LetterOutcome.PLANNED)
    if ends:
        return PlanMoved(plan.plan_id, PlanState.DONE, "", "")
    least = plan.settings.stop_after
    if plan.state is PlanState.CANARY:
        least = min(least, 1 if canary_ends else plan.settings.canary)
    if stop_reason(plan, least) and (why := stop_reason(plan, least, _in_hand(state, group))):
        return pause_of(plan, why, resume_to=PlanState.RAMPING if canary_ends else plan.state)
    if canary_ends and plan.settings.pause:
        return pause_of(plan, CANARY_IS_THROUGH, resume_to=PlanState.RAMPING)
    if canary_ends:
        return PlanMoved(plan.plan_id, PlanState.RAMPING, "", "")
    return None


def _in_hand(state: State, group: ConsumerGroup) -> int:
    """Return the number of failed messages that members have had for a short time.

    Members tell of failures at once, and of what they have processed later, in bulk. So
    these count as such that have not failed.
    """
    since = state.stored_at - IN_HAND_US
    return sum(len(one.rows) for one in group.leases.values() if one.granted_at >= since)


def stop_reason(plan: Plan, least: int, in_hand: int = 0) -> str:
    """Return why the stop rule holds, if there are as many outcomes as it needs. The
    first failure of a letter is one. Beside them, so many messages are `in_hand`.
    """
    if not plan.settings.stop_after or len(plan.recent) < max(least, 1):
        return ""
    deaths = Counter(fingerprint for fingerprint in plan.recent if fingerprint)
    for fingerprint, count in deaths.most_common(1):
        if count > plan.settings.stop_share * (len(plan.recent) + in_hand):
            seen = len(plan.recent)
            return f"{count} of the last {seen} failed again: {fingerprint}"[:MAX_REASON]
    return ""


def room(plan: Plan) -> int:
    """Return how many letters may be put back now, whatever the rate."""
    left = plan.count(LetterOutcome.PLANNED)
    if plan.settings.in_flight:
        left = min(left, plan.settings.in_flight - plan.count(LetterOutcome.DELIVERED))
    if plan.state is PlanState.CANARY:
        left = min(left, plan.settings.canary - plan.put_back)
    return left


def reason_to_skip(
    state: State, plan: Plan, placed: PlacedLetter, row: FailedMessage | None
) -> str:
    """Return why a planned letter is not put back any more; "" = it is."""
    if state.topics_by_id[placed.ref[0]].deleted:
        return "its topic was deleted"
    if reason := failures.closed_reason(row):
        return reason
    assert row is not None, "it is open"
    if (row.plan, row.number) != (plan.plan_id, placed.letter.number):
        return DIED_AGAIN
    return ""


def apply_put_back(state: State, event: PlanPutBack, context: RecordContext) -> None:
    """Apply: the letters of `moves` have rows of retries. All others up to the cursor
    are retries because it has passed them.
    """
    plan, group = state.plans.by_id[event.plan_id], state.groups.by_id[event.group_id]
    leave(state, plan, group, event.skipped, LetterOutcome.SKIPPED)
    for move in event.moves:
        topic_id, partition, offset, row = failed_rows.decode_move(move)
        _set_outcome(
            state, plan, row.visible_at, (topic_id, partition, offset), LetterOutcome.DELIVERED
        )
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)
    passed = plan_letters.untouched(state, plan.plan_id, plan.cursor, event.cursor)
    plan.cursor = event.cursor
    plan_letters.count_passed(state, plan, len(passed), LetterOutcome.DELIVERED)
    passed_letters.put_back(state, group, plan.plan_id, passed, context.end)


def leave(
    state: State,
    plan: Plan,
    group: ConsumerGroup,
    letters: tuple[SkippedLetter, ...],
    outcome: LetterOutcome,
) -> None:
    """Apply: letters leave a plan, each for its reason."""
    for topic_id, partition, offset, visible_at, why in letters:
        ref = (topic_id, partition, offset)
        failed_changes.leave_plan(state, group, ref, plan.plan_id)
        _set_outcome(state, plan, visible_at, ref, outcome, why)


def _set_outcome(
    state: State,
    plan: Plan,
    visible_at: int,
    ref: MessageRef,
    outcome: LetterOutcome,
    why: str = "",
) -> None:
    key = plan_letters.key_of(plan.plan_id, visible_at, ref)
    letter = plan_letters.get(state, key)
    assert letter is not None, "it was planned"
    plan_letters.change(state, plan, key, letter._replace(outcome=outcome, why=why))


DECIDERS: Deciders = {
    AdvancePlan: decide_advance,
}
APPLIERS: Appliers = {PlanPutBack: apply_put_back}
