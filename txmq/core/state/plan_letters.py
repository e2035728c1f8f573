"""The letters of replay plans, and the outcome of each.

Table `plan_letters` has a row for each letter of a plan, in the order of publication,
so that the letters of a key are a chain. The row of a failed message names its plan.
So an outcome is recorded where the message's row ends or dies again
(`failed_changes`), and messages without a plan cost nothing.

Up to the cursor of a plan, a letter without an outcome has been put back: putting back
moves the cursor, and changes no row. Of those that are processed then, table
`plan_done` has a bit: 64 neighbours of a partition have a row, (processed, swept).
In a plan that was never started, a letter is abandoned where the cursor passes it.
Until a letter is swept, its rows as a failed message are as before
(`passed_letters`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state.plans import LetterOutcome, Plan
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.state.state import State


NO_PRINT = "no fingerprint"
ABANDONED = "abandoned"  # the outcome of a letter
CHUNK = 64  # offsets of a row of table `plan_done`


class PlanLetter(NamedTuple):
    """A row of table `plan_letters`.

    `number` is the letter's number when it was planned, `died_as` the one that it got
    when it died again. `why` is the reason of an outcome, or the fingerprint with which
    a letter failed first after it was put back.
    """

    outcome: int
    number: int
    died_as: int = 0
    why: str = ""


class PlacedLetter(NamedTuple):
    """A letter of a plan with its place."""

    key: bytes
    ref: MessageRef
    visible_at: int
    letter: PlanLetter


def key_of(plan_id: int, visible_at: int, ref: MessageRef) -> bytes:
    """Return the key of a letter."""
    return t.PLAN_LETTER_KEY.pack(plan_id, visible_at, *ref)


def get(state: State, key: bytes) -> PlanLetter | None:
    """Return a letter of a plan."""
    row: Any = state.tables[t.PLAN_LETTERS].get(key)
    if row is None:
        return None
    plan_id, _visible_at, *ref = t.PLAN_LETTER_KEY.unpack(key)
    plan, letter = state.plans.by_id.get(plan_id), PlanLetter(*row)
    if plan is None or key > plan.cursor or letter.outcome != LetterOutcome.PLANNED:
        return letter
    return _passed(state, plan, ref, letter)


def _passed(state: State, plan: Plan, ref: Sequence[int], letter: PlanLetter) -> PlanLetter:
    """Return a letter as it is once the cursor has passed it."""
    if plan.abandons:
        return letter._replace(outcome=LetterOutcome.ENDED, why=ABANDONED)
    topic_id, partition, offset = ref
    done = _bits(state, plan.plan_id, topic_id, partition, offset) >> offset % CHUNK & 1
    return letter._replace(outcome=LetterOutcome.PROCESSED if done else LetterOutcome.DELIVERED)


def _bits(state: State, plan_id: int, topic_id: int, partition: int, offset: int) -> int:
    """Return the bits of the processed letters in the chunk of this one."""
    key = t.PLAN_DONE_KEY.pack(plan_id, topic_id, partition, offset // CHUNK)
    row: Any = state.tables[t.PLAN_DONE].get(key)
    return 0 if row is None else int(row[0])


def is_unswept(state: State, plan: Plan, ref: MessageRef) -> bool:
    """Return True if a letter is processed, and its rows are still there."""
    topic_id, partition, offset = ref
    if (topic_id, partition, offset // CHUNK) not in plan.unswept:
        return False
    return bool(_bits(state, plan.plan_id, *ref) >> offset % CHUNK & 1)


def letters_of(
    state: State, plan_id: int, after: bytes = b"", last: bytes | None = None
) -> Iterator[PlacedLetter]:
    """Yield the letters of a plan in order, from those behind the key `after` on, up to
    the key `last`.
    """
    plan = state.plans.by_id.get(plan_id)
    for key, row in rows_of(state, plan_id, after, last):
        _plan_id, visible_at, *ref = t.PLAN_LETTER_KEY.unpack(key)
        letter = PlanLetter(*row)
        if plan and key <= plan.cursor and letter.outcome == LetterOutcome.PLANNED:
            letter = _passed(state, plan, ref, letter)
        yield PlacedLetter(key, (ref[0], ref[1], ref[2]), visible_at, letter)


def untouched(state: State, plan_id: int, after: bytes, last: bytes) -> list[MessageRef]:
    """Return the letters behind the key `after`, up to the key `last`, whose rows have
    no outcome: that the cursor passes, or has passed, without a change of the row.
    """
    refs: list[Any] = [
        t.PLAN_LETTER_KEY.unpack(key)[2:]
        for key, letter in rows_of(state, plan_id, after, last)
        if letter[0] == LetterOutcome.PLANNED
    ]
    return refs


def rows_of(
    state: State, plan_id: int, after: bytes = b"", last: bytes | None = None
) -> Iterator[tuple[bytes, Any]]:
    """Yield the keys and rows of a plan's letters, from those behind the key `after`
    on, up to the key `last`. Of letters that are put back the rows do not say so.
    """
    start = max(after + b"\0", t.PLAN_KEY.pack(plan_id))
    stop = t.PLAN_KEY.pack(plan_id + 1) if last is None else last + b"\0"
    return state.tables[t.PLAN_LETTERS].range(start, stop)


def add(state: State, plan: Plan, key: bytes, letter: PlanLetter) -> None:
    """Apply: add a letter to a plan that is being built."""
    state.tables[t.PLAN_LETTERS].put(key, tuple(letter))
    _count(plan, letter.outcome, 1)
    state.plans.dirty.add(plan.plan_id)


def change(state: State, plan: Plan, key: bytes, letter: PlanLetter) -> None:
    """Apply: a letter has another outcome."""
    before = get(state, key)
    assert before is not None, "it was planned"
    _count(plan, before.outcome, -1)
    add(state, plan, key, letter)


def count_passed(state: State, plan: Plan, letters: int, outcome: LetterOutcome) -> None:
    """Apply: the cursor has passed so many letters that nothing had become of."""
    _count(plan, LetterOutcome.PLANNED, -letters)
    _count(plan, outcome, letters)
    state.plans.dirty.add(plan.plan_id)


def _count(plan: Plan, outcome: int, change: int) -> None:
    plan.counts[outcome] = plan.counts.get(outcome, 0) + change
    if not plan.counts[outcome]:
        del plan.counts[outcome]


def holder(state: State, plan_id: int) -> Plan | None:
    """Return the unfinished plan of this id, which a letter's row names."""
    plan = state.plans.by_id.get(plan_id) if plan_id else None
    return plan if plan is not None and plan.unfinished else None


def died(
    state: State, plan_id: int, visible_at: int, ref: MessageRef, number: int, fingerprint: str
) -> bool:
    """Apply: a message of a plan is a dead letter, with this number. Return True if the
    plan had put it back, and so has nothing to do with it any more.
    """
    found = _find(state, plan_id, visible_at, ref)
    if found is None or found[1].outcome != LetterOutcome.DELIVERED:
        return False
    plan, letter = found
    if not letter.why:
        _note_recent(plan, fingerprint or NO_PRINT)
    why = fingerprint or NO_PRINT
    again = letter._replace(outcome=LetterOutcome.DIED_AGAIN, died_as=number, why=why)
    change(state, plan, key_of(plan_id, visible_at, ref), again)
    return True


def failed(state: State, plan_id: int, visible_at: int, ref: MessageRef, fingerprint: str) -> None:
    """Apply: a message of a plan has failed. Its first failure counts for the plan's
    stop rule: it may be retried for hours before it is dead.
    """
    found = _find(state, plan_id, visible_at, ref)
    if found is None or found[1].outcome != LetterOutcome.DELIVERED or found[1].why:
        return
    plan, letter = found
    key = key_of(plan_id, visible_at, ref)
    change(state, plan, key, letter._replace(why=fingerprint or NO_PRINT))
    _note_recent(plan, fingerprint or NO_PRINT)


def ended(state: State, plan_id: int, visible_at: int, ref: MessageRef, why: str) -> None:
    """Apply: a message of a plan is no failed message any more; "" = it was processed.

    A letter that the plan has not put back is skipped for that reason. What becomes of
    one that a finished plan left is not its outcome.
    """
    found = _find(state, plan_id, visible_at, ref)
    if found is None:
        return
    plan, letter = found
    if letter.outcome == LetterOutcome.DELIVERED:
        outcome = LetterOutcome.ENDED if why else LetterOutcome.PROCESSED
        if not why:
            _note_recent(plan, "")
    elif letter.outcome == LetterOutcome.PLANNED and plan.unfinished:
        outcome, why = LetterOutcome.SKIPPED, why or "processed"
    else:
        return
    key = key_of(plan_id, visible_at, ref)
    change(state, plan, key, letter._replace(outcome=outcome, why=why))


def processed(state: State, plan_id: int, refs: list[MessageRef]) -> None:
    """Apply: letters that their plan has put back are processed, and nothing was known
    of them since.
    """
    plan, chunks = state.plans.by_id[plan_id], dict[tuple[int, int, int], int]()
    for topic_id, partition, offset in refs:
        chunk = (topic_id, partition, offset // CHUNK)
        chunks[chunk] = chunks.get(chunk, 0) | 1 << offset % CHUNK
    table = state.tables[t.PLAN_DONE]
    for chunk, bits in chunks.items():
        key = t.PLAN_DONE_KEY.pack(plan_id, *chunk)
        row: Any = table.get(key) or (0, 0)
        table.put(key, (row[0] | bits, row[1]))
        plan.unswept[chunk] = plan.unswept.get(chunk, 0) + bits.bit_count()
    _count(plan, LetterOutcome.DELIVERED, -len(refs))
    _count(plan, LetterOutcome.PROCESSED, len(refs))
    for _ in range(min(len(refs), plan.settings.stop_after)):
        _note_recent(plan, "")
    state.plans.dirty.add(plan_id)


def unswept(state: State, plan: Plan, chunk: tuple[int, int, int]) -> list[MessageRef]:
    """Return the processed letters of a chunk that still have rows."""
    if chunk not in plan.unswept:
        return []  # the log has lost that they are processed
    topic_id, partition, number = chunk
    row: Any = state.tables[t.PLAN_DONE].get(t.PLAN_DONE_KEY.pack(plan.plan_id, *chunk))
    left = row[0] & ~row[1]
    return [(topic_id, partition, number * CHUNK + at) for at in range(CHUNK) if left >> at & 1]


def set_swept(state: State, plan: Plan, chunk: tuple[int, int, int]) -> None:
    """Apply: the rows of the processed letters of a chunk are removed."""
    if plan.unswept.pop(chunk, None) is None:
        return
    key = t.PLAN_DONE_KEY.pack(plan.plan_id, *chunk)
    row: Any = state.tables[t.PLAN_DONE].get(key)
    state.tables[t.PLAN_DONE].put(key, (row[0], row[0]))
    state.plans.dirty.add(plan.plan_id)


def forget_done(state: State, plan: Plan, most: int) -> bool:
    """Apply: remove at most so many rows of a deleted plan. Return True if there are no
    more.
    """
    table = state.tables[t.PLAN_DONE]
    start, stop = t.PLAN_KEY.pack(plan.plan_id), t.PLAN_KEY.pack(plan.plan_id + 1)
    keys = [key for key, _row in islice(table.range(start, stop), most)]
    for key in keys:
        table.delete(key)
    return len(keys) < most


def _find(
    state: State, plan_id: int, visible_at: int, ref: MessageRef
) -> tuple[Plan, PlanLetter] | None:
    plan = state.plans.by_id.get(plan_id)
    letter = None if plan is None else get(state, key_of(plan_id, visible_at, ref))
    return None if plan is None or letter is None else (plan, letter)


def _note_recent(plan: Plan, fingerprint: str) -> None:
    if most := plan.settings.stop_after:
        plan.recent = (*plan.recent[1 - most :], fingerprint) if most > 1 else (fingerprint,)
