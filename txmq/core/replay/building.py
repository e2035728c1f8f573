"""The letters of a replay plan that is being built: they are added, and frozen."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.plans import NotPlanned, PlanFrozen, PlanLettersAdded
from txmq.core.replay.orders import MAX_REASON, find_plan, start_of
from txmq.core.replay.policies import is_own
from txmq.core.replay.putting_back import DIED_AGAIN
from txmq.core.state import failed_changes, failed_messages, plan_letters
from txmq.core.state.plan_letters import PlanLetter
from txmq.core.state.plans import LetterOutcome, Plan, PlanState
from txmq.errors import BadRequest, Conflict
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State
    from txmq.core.steps import Steps

ADDED_LETTERS = 1_000  # by one record
READ_ROWS = 250  # by one step of the digest: about a millisecond


class AddPlanLetters(NamedTuple):
    """Add letters to a plan that is being built. Repeating the command is fine.

    `damaged` are letters whose messages cannot be read, with the reason. `complete`:
    there are no more; otherwise the search goes on at `scan`. `numbers` are those of
    letters that the client has judged: one that died again since is skipped.
    """

    name: str
    letters: tuple[TopicOffset, ...]
    damaged: tuple[tuple[str, int, int, str], ...] = ()
    scan: str = ""
    complete: bool = False
    numbers: tuple[int, ...] = ()


class AddedReply(NamedTuple):
    """Number of letters that were added, and of those that will be skipped; `refused`
    are no failed messages.
    """

    added: int
    skipped: int
    refused: tuple[TopicOffset, ...]


class FreezePlan(NamedTuple):
    """Fix the letters of a plan; `digest` is `manifest_digest`."""

    plan_id: int
    digest: str


def manifest_digest(state: State, plan: Plan) -> Steps[str]:
    """Return the digest of a plan's letters, in steps: SHA-256 over a line of JSON for
    each, [topic, partition, offset], in the order of publication.
    """
    digest, after = hashlib.sha256(), b""
    names: dict[int, str] = {}
    while rows := list(islice(plan_letters.rows_of(state, plan.plan_id, after), READ_ROWS)):
        lines: list[str] = []
        for key, _row in rows:
            _plan_id, _visible_at, topic_id, partition, offset = t.PLAN_LETTER_KEY.unpack(key)
            name = names.get(topic_id)
            if name is None:
                name = names[topic_id] = json.dumps(state.topics_by_id[topic_id].name)
            lines.append(f"[{name},{partition},{offset}]\n")
        digest.update("".join(lines).encode())
        after = rows[-1][0]
        yield
    return digest.hexdigest()


def decide_add(state: State, command: AddPlanLetters, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if plan.state is not PlanState.BUILDING or plan.complete:
        if plan.complete and _has_all(state, plan, command.letters):
            return Outcome(reply=AddedReply(0, 0, ()))
        message = f"the letters of plan {plan.name!r} are fixed"
        raise Conflict(message, hint="make another plan: txmq plan create")
    if len(command.letters) + len(command.damaged) > ADDED_LETTERS:
        message = f"{len(command.letters)} letters in one call are too many"
        raise BadRequest(message, hint=f"send at most {ADDED_LETTERS} in each call")
    added, refused = _new_letters(state, plan, command)
    skipped = sum(bool(why) for *_ref, why in added)
    reply = AddedReply(len(added) - skipped, skipped, tuple(refused))
    if not (added or command.complete or command.scan != plan.scan):
        return Outcome(reply=reply)
    scan = "" if command.complete else command.scan
    event = PlanLettersAdded(plan.plan_id, tuple(added), scan, command.complete)
    return Outcome((event,), reply)


def _new_letters(
    state: State, plan: Plan, command: AddPlanLetters
) -> tuple[list[NotPlanned], list[TopicOffset]]:
    """Return the letters that the plan does not have yet, each with why it will be
    skipped, "" = it will not; and the places that have no failed message.
    """
    group = state.groups.by_id[plan.group_id]
    damaged = {(topic, at, offset): why for topic, at, offset, why in command.damaged}
    judged = dict(zip(command.letters, command.numbers, strict=False))
    added: list[NotPlanned] = []
    refused: list[TopicOffset] = []
    for place in dict.fromkeys((*command.letters, *damaged)):
        ref, row = failures.find_message(state, group, *place)
        if ref is None or row is None:
            refused.append(place)
            continue
        # rows name their plan, but for those of letters that it will skip
        may_be_in = row.plan == plan.plan_id or plan.count(LetterOutcome.SKIPPED)
        if may_be_in and _is_in(state, plan, ref, row):
            continue
        again = DIED_AGAIN if judged.get(place, row.number) != row.number else ""
        why = _not_open(state, row) or again or damaged.get(place, "")
        # A policy selects what its plan cannot have again, until a plan can.
        if not (why and is_own(state, plan)):
            added.append((*ref, why[:MAX_REASON]))
    return added, refused


def _has_all(state: State, plan: Plan, letters: tuple[TopicOffset, ...]) -> bool:
    """Return True if these letters were added before: the call is repeated."""
    group = state.groups.by_id.get(plan.group_id)
    found = [] if group is None else [failures.find_message(state, group, *at) for at in letters]
    return len(found) == len(letters) and all(
        ref is not None and row is not None and _is_in(state, plan, ref, row) for ref, row in found
    )


def _is_in(state: State, plan: Plan, ref: MessageRef, row: FailedMessage) -> bool:
    key = plan_letters.key_of(plan.plan_id, row.visible_at, ref)
    return plan_letters.get(state, key) is not None


def _not_open(state: State, row: FailedMessage) -> str:
    """Return why a plan cannot have this letter; "" = it can."""
    return failures.closed_reason(row) or failures.held_reason(state, row)


def decide_freeze(state: State, command: FreezePlan, _now: int) -> Outcome:
    plan = state.plans.by_id.get(command.plan_id)
    if plan is None or plan.state is not PlanState.BUILDING or not plan.complete:
        return Outcome()
    frozen = PlanFrozen(plan.plan_id, command.digest)
    if _may_start(state, plan):
        return Outcome((frozen, start_of(plan, plan.by)))
    return Outcome((frozen,))


def is_to_start(state: State, plan: Plan) -> bool:
    """Return True if a frozen plan is to start by itself, and has not: the circuit
    breaker was open, or the power failed between the two records.
    """
    return plan.state is PlanState.PLANNED and _may_start(state, plan)


def _may_start(state: State, plan: Plan) -> bool:
    wanted = plan.settings.start and not plan.waits_for_approval
    return wanted and state.groups.by_id[plan.group_id].breaker is None


def apply_added(state: State, event: PlanLettersAdded, _context: RecordContext) -> None:
    plan = state.plans.by_id[event.plan_id]
    group = state.groups.by_id[plan.group_id]
    for topic_id, partition, offset, why in event.letters:
        ref = (topic_id, partition, offset)
        row = failed_messages.get(state, group, ref)
        assert row is not None, "it was found"
        key = plan_letters.key_of(plan.plan_id, row.visible_at, ref)
        outcome = LetterOutcome.SKIPPED if why else LetterOutcome.PLANNED
        plan_letters.add(state, plan, key, PlanLetter(outcome, row.number, why=why))
        if not why:
            held = row._replace(plan=plan.plan_id)
            failed_changes.change_fields(state, group.group_id, ref, held)
    plan.scan, plan.complete = event.scan, event.complete
    state.plans.dirty.add(plan.plan_id)


def apply_frozen(state: State, event: PlanFrozen, context: RecordContext) -> None:
    plan = state.plans.by_id[event.plan_id]
    plan.digest, plan.changed_at = event.digest, context.stored_at
    state.plans.set_state(plan, PlanState.PLANNED)


DECIDERS: Deciders = {
    AddPlanLetters: decide_add,
    FreezePlan: decide_freeze,
}
APPLIERS: Appliers = {
    PlanLettersAdded: apply_added,
    PlanFrozen: apply_frozen,
}
