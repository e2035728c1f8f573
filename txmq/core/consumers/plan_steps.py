"""The background work of replay plans: freezing their letters, putting them back at a
pace that a timer sets, and removing what deleted plans have left.

Each step is decided on the tables alone, and is one record. So a restart of the broker
goes on where the last record ended.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import failures, key_fences
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.consumers.plans import find_plan, pause_of, start_of
from txmq.core.consumers.policies import is_own
from txmq.core.events.outcome import Appliers, Deciders, Outcome, Rejected
from txmq.core.events.plans import (
    NotPlanned,
    PlanAbandonedSwept,
    PlanAdvanced,
    PlanFrozen,
    PlanLettersAdded,
    PlanLettersLost,
    PlanMoved,
    PlanPacked,
    PlanPutBack,
    PlanSwept,
    PlanTidied,
    SkippedLetter,
)
from txmq.core.state import failed_messages, failed_rows, passed_letters, plan_blocks, plan_letters
from txmq.core.state.failed_rows import CLOSED
from txmq.core.state.plan_blocks import Block, PlacedBlock
from txmq.core.state.plan_letters import PlacedLetter, PlanLetter
from txmq.core.state.plans import RUNNING, LetterOutcome, Plan, PlanState
from txmq.errors import BadRequest, Conflict
from txmq.model.units import SECOND
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State
    from txmq.core.steps import Steps

STEP_LETTERS = 500  # put back by one record, each by itself: about 7 ms
STEP_BLOCKS = 32  # likewise: about 2 ms
PACKED_LETTERS = 500  # of one record
ABANDONED_BLOCKS = 8  # of one record: up to 5 ms where letters have hundreds of errors
SWEPT_LETTERS = 64  # processed ones, of one record: about a millisecond
SWEPT_ABANDONED = 100  # likewise, but each gets another row and other places: about 6 ms
STEP_ROWS = 1_000  # read, added, changed or removed by one record
READ_ROWS = 250  # by one step of the digest: about a millisecond
MAX_REASON = 256  # characters
IN_HAND_US = 2 * SECOND  # within which members tell what they have processed
DIED_AGAIN = "it was replayed since, and died again"


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


class PackPlan(NamedTuple):
    """Pack the next letters of a plan that is about to be frozen."""

    plan_id: int


class PackReply(NamedTuple):
    """`more`: other letters are left."""

    more: bool


class FreezePlan(NamedTuple):
    """Fix the letters of a plan; `digest` is `manifest_digest`."""

    plan_id: int
    digest: str


class AdvancePlan(NamedTuple):
    """Put back at most so many of the next letters of a running plan."""

    plan_id: int
    most: int


class AdvanceReply(NamedTuple):
    """Number of letters that were put back. `more`: there is more to do at once."""

    letters: int
    more: bool = False


class EndLostLetters(NamedTuple):
    """End letters of a plan that were put back and will not be delivered: their topics
    were deleted since, they wait for a dead letter of their key, or the log has lost
    what became of them. `after` is the key of the letter to go on behind.
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


def decide_add(state: State, command: AddPlanLetters, now: int) -> Outcome | Rejected:
    del now
    plan = find_plan(state, command.name)
    if isinstance(plan, Rejected):
        return plan
    if plan.state is not PlanState.BUILDING or plan.complete:
        if plan.complete and _has_all(state, plan, command.letters):
            return Outcome(reply=AddedReply(0, 0, ()))
        message = f"the letters of plan {plan.name!r} are fixed"
        return Rejected(Conflict, message, "make another plan: txmq plan create")
    if len(command.letters) + len(command.damaged) > STEP_ROWS:
        message = f"{len(command.letters)} letters in one call are too many"
        return Rejected(BadRequest, message, f"send at most {STEP_ROWS} in each call")
    group = state.groups.by_id[plan.group_id]
    damaged = {(topic, at, offset): why for topic, at, offset, why in command.damaged}
    judged = dict(zip(command.letters, command.numbers, strict=False))
    added: list[NotPlanned] = []
    refused: list[TopicOffset] = []
    for place in dict.fromkeys((*command.letters, *damaged)):
        ref, row = failures.find_message(state, group, *place)
        if ref is None or row is None:
            refused.append(place)
        elif not (plan.count(LetterOutcome.SKIPPED) or row.plan == plan.plan_id) or not _is_in(
            state, plan, ref, row
        ):
            again = DIED_AGAIN if judged.get(place, row.number) != row.number else ""
            why = _not_open(state, row) or again or damaged.get(place, "")
            if not (why and is_own(state, plan)):  # which selects them again until it can
                added.append((*ref, why[:MAX_REASON]))
    skipped = sum(bool(why) for *_ref, why in added)
    reply = AddedReply(len(added) - skipped, skipped, tuple(refused))
    if not (added or command.complete or command.scan != plan.scan):
        return Outcome(reply=reply)
    scan = "" if command.complete else command.scan
    event = PlanLettersAdded(plan.plan_id, tuple(added), scan, command.complete)
    return Outcome((event,), reply)


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


def decide_pack(state: State, command: PackPlan, now: int) -> Outcome:
    del now
    plan = state.plans.by_id.get(command.plan_id)
    if plan is None or plan.state is not PlanState.BUILDING or not plan.complete:
        return Outcome(reply=PackReply(more=False))
    rows = plan_letters.rows_of(state, plan.plan_id, plan.packed)
    keys = [key for key, _row in islice(rows, PACKED_LETTERS)]
    if not keys:
        return Outcome(reply=PackReply(more=False))
    return Outcome((PlanPacked(plan.plan_id, keys[-1]),), PackReply(more=True))


def decide_freeze(state: State, command: FreezePlan, now: int) -> Outcome:
    del now
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
    planned, cursor = _PlannedLetters(state, plan, group, changes, most), plan.cursor
    for one in plan_blocks.walk(state, plan, cursor, fits=planned.has_room):
        if planned.is_full:
            break
        cursor = one.key
        if isinstance(one, PlacedBlock):
            planned.pass_block(one.block)
        elif why := planned.pass_letter(one, now):
            skipped.append((*one.ref, one.visible_at, why))
    if cursor == plan.cursor:
        why = f"the log has lost {plan.count(LetterOutcome.PLANNED)} of its letters"
        return Outcome((PlanMoved(plan.plan_id, PlanState.CANCELLED, why, ""),), AdvanceReply(0))
    ids = (plan.plan_id, group.group_id)
    event = PlanPutBack(*ids, cursor, planned.replayed, *changes.parts(), tuple(skipped))
    return Outcome((event,), AdvanceReply(planned.replayed, more=True))


class _PlannedLetters:
    """The letters that a plan has not put back yet, and those of them that it puts back
    now, at most so many.
    """

    def __init__(
        self, state: State, plan: Plan, group: ConsumerGroup, changes: FailureChanges, most: int
    ) -> None:
        self._state, self._plan, self._group, self._most = state, plan, group, most
        self._changes = changes
        self._replayed: set[MessageRef] = set()
        self._row: FailedMessage | None = None
        self._looked_at = self._blocks = self._in_blocks = 0

    @property
    def replayed(self) -> int:
        """Number of letters that are put back now."""
        return len(self._replayed) + self._in_blocks

    @property
    def is_full(self) -> bool:
        """True if no more letters may be put back, or have room in the record. There
        may be one more of them: see `failures.put_back`.
        """
        return (
            self.replayed >= self._most
            or len(self._replayed) >= STEP_LETTERS
            or self._looked_at >= STEP_ROWS
            or self._blocks >= STEP_BLOCKS
        )

    def has_room(self, block: Block) -> bool:
        """Return True if all letters of a block may be put back now."""
        return (
            self.replayed + block.letters <= self._most
            and not any(self._state.topics_by_id[run.topic_id].deleted for run in block.runs)
            and self._changes.may_lead(block.keyed_letters())
        )

    def pass_block(self, block: Block) -> None:
        """Put back the letters of a block."""
        letters = block.keyed_letters()
        self._changes.lead_again(letters)
        self._looked_at += len(letters)
        self._blocks += 1
        self._in_blocks += block.letters

    def pass_letter(self, placed: PlacedLetter, now: int) -> str:
        """Put back a letter, unless something has become of it; return why it is
        skipped, "" = it is not.
        """
        self._looked_at += 1
        ref = placed.ref
        if placed.letter.outcome != LetterOutcome.PLANNED or ref in self._replayed:
            return ""
        row = failed_messages.planned(self._state, self._group, ref, self._plan.plan_id)
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

    def put_back(self, changes: FailureChanges, ref: MessageRef, now: int) -> None:
        """Add a letter that the cursor passes. Its row changes only where it waits
        behind another message of its key.
        """
        del now
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
    if canary_ends and plan.settings.hold:
        return pause_of(plan, "the canary is through", resume_to=PlanState.RAMPING)
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


def what_may_be_lost(state: State, plan: Plan) -> tuple[int, ...] | None:
    """Return numbers that change whenever other letters of the plan may be lost: put
    back, and never to be delivered. None = no letter can be.
    """
    group = state.groups.by_id.get(plan.group_id)
    if group is None or not plan.count(LetterOutcome.DELIVERED):
        return None
    deleted = sum(
        state.topics_by_id[topic_id].deleted
        for topic_id in {topic_id for topic_id, _partition in group.positions}
    )
    # letters of a group that skips dead letters have no fence
    waits = plan.state not in RUNNING or room(plan) <= 0
    may_wait = waits and group.ordered and group.letters > 0 and bool(group.fences)
    if not (deleted or may_wait or state.lost_log_end):
        return None
    deaths = group.next_letter if may_wait else 0
    return deleted, deaths, state.lost_log_end


def decide_end_lost(state: State, command: EndLostLetters, now: int) -> Outcome:
    del now
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
    if state.topics_by_id[ref[0]].deleted:
        return "its topic was deleted"
    row = failed_messages.get(state, group, ref)
    if row is None or row.plan != plan.plan_id or row.kind in CLOSED:
        return "the log has lost what became of it"
    head = FailureChanges(state, group, 0).dead_head(ref, row.key_hash)
    return "" if head is None else failures.behind(state, head)


def decide_sweep(state: State, command: SweepPlan, now: int) -> Outcome:
    del now
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


def apply_added(state: State, event: PlanLettersAdded, context: RecordContext) -> None:
    del context
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
            failed_messages.set_plan(state, group, ref, row, plan.plan_id)
    plan.scan, plan.complete = event.scan, event.complete
    state.plans.dirty.add(plan.plan_id)


def apply_packed(state: State, event: PlanPacked, context: RecordContext) -> None:
    del context
    plan = state.plans.by_id[event.plan_id]
    group = state.groups.by_id[plan.group_id]

    def open_letter(ref: MessageRef) -> FailedMessage | None:
        return passed_letters.open_letter(state, group, ref, plan.plan_id)

    plan_blocks.pack(state, plan, event.cursor, open_letter, keyed=group.ordered)


def apply_frozen(state: State, event: PlanFrozen, context: RecordContext) -> None:
    plan = state.plans.by_id[event.plan_id]
    plan.digest, plan.changed_at = event.digest, context.stored_at
    state.plans.set_state(plan, PlanState.PLANNED)


def apply_advanced(state: State, event: PlanAdvanced | PlanPutBack, context: RecordContext) -> None:
    """Apply: the letters of `moves` have rows of retries. All others up to the cursor
    are retries because it has passed them: a PlanAdvanced has none of these, unless the
    log has lost others.
    """
    plan, group = state.plans.by_id[event.plan_id], state.groups.by_id[event.group_id]
    leave(state, plan, group, event.skipped, LetterOutcome.SKIPPED)
    for move in event.moves:
        topic_id, partition, offset, row = failed_rows.decode_move(move)
        _set(state, plan, row.visible_at, (topic_id, partition, offset), LetterOutcome.DELIVERED)
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)
    if event.cursor > plan.cursor:
        _pass(state, plan, group, event.cursor, context.end)


def _pass(state: State, plan: Plan, group: ConsumerGroup, cursor: bytes, end: int) -> None:
    """Apply: put back what nothing has become of, up to the cursor, by a record that
    ends there in the log.
    """
    passed: list[MessageRef | PlacedBlock] = []
    letters = 0
    for one in plan_blocks.walk(state, plan, plan.cursor, cursor):
        if isinstance(one, PlacedBlock):
            passed.append(one)
            letters += one.block.letters
        elif one.letter.outcome == LetterOutcome.PLANNED:
            passed.append(one.ref)
            letters += 1
    plan.cursor = cursor
    plan_letters.count_passed(state, plan, letters, LetterOutcome.DELIVERED)
    passed_letters.put_back(state, group, plan.plan_id, passed, end)


def apply_lost(state: State, event: PlanLettersLost, context: RecordContext) -> None:
    del context
    plan, group = state.plans.by_id[event.plan_id], state.groups.by_id[event.group_id]
    leave(state, plan, group, event.letters, LetterOutcome.ENDED)


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
        failed_messages.leave_plan(state, group, ref, plan.plan_id)
        _set(state, plan, visible_at, ref, outcome, why)


def _set(
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


def apply_swept(state: State, event: PlanSwept, context: RecordContext) -> None:
    del context
    plan = state.plans.by_id[event.plan_id]
    for topic_id, partition, number in event.chunks:
        letters = plan_letters.sweep(state, plan, (topic_id, partition, number))
        passed_letters.sweep_letters(state, plan.plan_id, event.group_id, letters)


def apply_abandoned_swept(state: State, event: PlanAbandonedSwept, context: RecordContext) -> None:
    del context
    plan = state.plans.by_id[event.plan_id]
    refs: list[Any] = [
        t.PLAN_LETTER_KEY.unpack(key)[2:]
        for key, letter in plan_letters.rows_of(state, plan.plan_id, plan.swept, event.cursor)
        if letter[0] == LetterOutcome.PLANNED
    ]
    passed_letters.sweep_abandoned(state, plan, event.group_id, refs)
    plan.swept = event.cursor
    state.plans.dirty.add(plan.plan_id)


def apply_tidied(state: State, event: PlanTidied, context: RecordContext) -> None:
    del context
    plan = state.plans.by_id[event.plan_id]
    for chunk in list(plan.unswept):  # the log has lost that they were swept
        swept = plan_letters.sweep(state, plan, chunk)
        passed_letters.sweep_letters(state, plan.plan_id, plan.group_id, swept)
    group = state.groups.find(plan.group_id)
    letters = list(islice(plan_letters.letters_of(state, plan.plan_id), event.most))
    for placed in letters:
        if group is not None and placed.letter.outcome == LetterOutcome.DELIVERED:
            failed_messages.leave_plan(state, group, placed.ref, plan.plan_id)
        elif plan.swept < placed.key <= plan.abandoned:  # likewise
            passed_letters.sweep_abandoned(state, plan, plan.group_id, [placed.ref])
        state.tables[t.PLAN_LETTERS].delete(placed.key)
    if (
        len(letters) < event.most
        and plan_blocks.forget_all(state, plan, event.most)
        and plan_letters.forget_done(state, plan, event.most)
    ):
        state.plans.remove(plan)


DECIDERS: Deciders = {
    AddPlanLetters: decide_add,
    PackPlan: decide_pack,
    FreezePlan: decide_freeze,
    AdvancePlan: decide_advance,
    EndLostLetters: decide_end_lost,
    SweepPlan: decide_sweep,
    TidyPlan: decide_tidy,
}
APPLIERS: Appliers = {
    PlanLettersAdded: apply_added,
    PlanPacked: apply_packed,
    PlanFrozen: apply_frozen,
    PlanAdvanced: apply_advanced,
    PlanPutBack: apply_advanced,
    PlanLettersLost: apply_lost,
    PlanSwept: apply_swept,
    PlanAbandonedSwept: apply_abandoned_swept,
    PlanTidied: apply_tidied,
}
