"""Invariants of replay plans: outcomes sum up, and each says what the tables say."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from txmq.core.state import failed_messages, plan_letters
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.state.plans import LetterOutcome, Plan, PlanState
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Mapping

    from txmq.core.state.plan_letters import PlacedLetter
    from txmq.core.state.state import State

Row = tuple[int, int, int, int]  # group id, topic id, partition, offset
ON_ITS_WAY = (FailedKind.RETRY, FailedKind.PARKED, FailedKind.LOCAL)


def check_plans(state: State) -> None:
    """Check what holds of plans at any time."""
    found: Any = state.tables[t.FAILED].range(b"")
    rows: dict[Row, FailedMessage] = {}
    for key, row in found:
        group_id, *ref = t.FAILED_KEY.unpack(key)
        group = state.groups.find(group_id)
        assert group is not None
        at = (ref[0], ref[1], ref[2])
        now = failed_messages.seen(state, group, at, FailedMessage(*row))
        if now is not None:
            rows[group_id, *at] = now
    for plan in state.plans.by_id.values():
        letters = list(plan_letters.letters_of(state, plan.plan_id))
        if plan.state is PlanState.DELETED:
            continue
        counts = Counter(placed.letter.outcome for placed in letters)
        assert counts == Counter(plan.counts), f"plan {plan.name}: {counts}, not {plan.counts}"
        check_limits(plan, _more(state, plan))
        for placed in letters:
            check_letter(plan, placed, rows)
    for place, row in rows.items():
        holder = plan_letters.holder(state, row.plan)
        if holder is not None:
            key = plan_letters.key_of(holder.plan_id, row.visible_at, place[1:])
            letter = plan_letters.get(state, key)
            assert letter is not None, f"{place} is not in the plan that it names"
            wanted = (LetterOutcome.PLANNED, LetterOutcome.DELIVERED)
            assert letter.outcome in wanted, f"{place} belongs to a plan that has its outcome"


def _more(state: State, plan: Plan) -> int:
    """Return by how many letters a plan may pass a limit: a dead letter that holds its
    key goes back with an earlier one that a group skipped before.
    """
    group = state.groups.by_id.get(plan.group_id)
    return int(group is not None and "on_exhausted" in group.settings.altered)


def check_limits(plan: Plan, more: int = 0) -> None:
    busy = plan.count(LetterOutcome.DELIVERED)
    canary = plan.state is PlanState.CANARY
    assert not canary or plan.put_back <= plan.settings.canary + more, "more than the canary"
    if plan.settings.in_flight:
        assert busy <= plan.settings.in_flight + more, "too many without an outcome"
    if plan.state is PlanState.DONE:
        assert not busy
        assert not plan.count(LetterOutcome.PLANNED), "done, and not all have their outcome"


def check_letter(plan: Plan, placed: PlacedLetter, rows: Mapping[Row, FailedMessage]) -> None:
    """Check that a letter with work left is where its outcome says."""
    row = rows.get((plan.group_id, *placed.ref))
    if placed.letter.outcome == LetterOutcome.DELIVERED:
        assert row is not None, f"{placed} is gone without an outcome"
        assert row.plan == plan.plan_id, f"{placed} has left its plan"
        assert row.kind in ON_ITS_WAY, f"{placed} is {row.kind}"
    elif placed.letter.why == plan_letters.ABANDONED and not plan.started_at:
        again = row is not None and row.number != placed.letter.number  # after a reset
        closed = row is not None and (row.kind, row.plan) == (FailedKind.ABANDONED, 0)
        assert row is None or again or closed, f"{placed}: {row}"
    elif placed.letter.outcome == LetterOutcome.PLANNED and plan.unfinished:
        assert row is not None, f"{placed} is gone"
        assert (row.kind, row.plan) == (FailedKind.LETTER, plan.plan_id), f"{placed} is {row}"
        assert not row.token, f"{placed} is reserved"
