"""Letters that the cursor of their replay plan has passed: put back, or abandoned.

Passing a letter changes neither its row nor its places in the index, only counts and
queues (docs/decisions/0093). `current` returns what a row stands
for: the retry, or the abandoned letter. The row itself changes when the letter fails or
is edited, and when it is swept. Once a letter that was put back is processed, a bit of
its plan says so. It is no failed message any more, and its rows wait to be swept.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from txmq.core.state import letter_cells, letter_index, plan_letters, put_back_queues
from txmq.core.state.failed_rows import FailedKind, FailedMessage, letter_of, replayed_row
from txmq.core.state.letter_cells import CellChanges, LetterState
from txmq.core.state.plans import LetterOutcome
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.plans import Plan
    from txmq.core.state.put_back import PlainLetter
    from txmq.core.state.state import State


def table_row(state: State, group_id: int, ref: MessageRef) -> FailedMessage | None:
    """Return the row that table `failed` has of a message."""
    row: Any = state.failed_messages.get(t.FAILED_KEY.pack(group_id, *ref))
    if row is None:
        return None
    return tuple.__new__(FailedMessage, row)  # as fast as it gets: this is done for millions


def failed_row(state: State, group_id: int, ref: MessageRef) -> FailedMessage | None:
    """Return the row of a message in table `failed`, unless the letter is processed."""
    row = table_row(state, group_id, ref)
    return None if row is None or is_over(state, ref, row) else row


def find(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Return what the row of a message stands for; None = it is no failed message."""
    row = table_row(state, group.group_id, ref)
    if row is None or not row.plan:  # most failed messages are in no plan
        return row
    return None if is_over(state, ref, row) else current(state, group, ref, row)


def is_over(state: State, ref: MessageRef, row: FailedMessage) -> bool:
    """Return True if a row of table `failed` is that of a letter that is processed
    since its plan has put it back.
    """
    return row.plan > 0 and plan_letters.is_unswept(state, row.plan, ref)


def current(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage
) -> FailedMessage:
    """Return what a row of table `failed` stands for: a letter that its plan has put
    back is a retry. The same row = its plan has not come to it, if there is one.
    """
    passed_by = _passed_by(state, ref, row)
    if passed_by is None:
        return row
    if _is_abandoned(passed_by, ref, row):
        return _abandoned_row(passed_by, row)
    lease, plan = group.leased_rows.get(ref), row.plan
    if lease is None:
        return replayed_row(row, kind=FailedKind.RETRY, plan=plan)
    consumer = group.leases[lease].member
    return replayed_row(row, kind=FailedKind.RETRY, plan=plan, attempt=1, consumer=consumer)


def _passed_by(state: State, ref: MessageRef, row: FailedMessage) -> Plan | None:
    """Return the plan of an open letter, if its cursor has passed it."""
    if not row.plan or row.kind != FailedKind.LETTER or row.token:
        return None
    plan = state.plans.by_id.get(row.plan)
    return plan if plan is not None and _key(ref, row) <= plan.cursor else None


def _key(ref: MessageRef, row: FailedMessage) -> bytes:
    return plan_letters.key_of(row.plan, row.visible_at, ref)


def _is_abandoned(plan: Plan, ref: MessageRef, row: FailedMessage) -> bool:
    # No key is made for plans that abandon nothing: most do not.
    return bool(plan.abandoned) and _key(ref, row) <= plan.abandoned


def _abandoned_row(plan: Plan, row: FailedMessage) -> FailedMessage:
    return row._replace(kind=FailedKind.ABANDONED, plan=0, reason=plan.reason)


def _is_put_back(state: State, ref: MessageRef, row: FailedMessage) -> bool:
    plan = _passed_by(state, ref, row)
    return plan is not None and not _is_abandoned(plan, ref, row)


def put_back(
    state: State,
    group: ConsumerGroup,
    plan_id: int,
    letters: Iterable[MessageRef],
    end: int,
) -> None:
    """Apply: a plan's cursor has passed these letters, by a record that ends there in
    the log.
    """
    cells: CellChanges = {}
    waiting, exported = Counter[tuple[int, int]](), 0
    for ref in letters:
        row = _held(state, group, ref, plan_id)
        if row is None:
            continue
        error, slot = put_back_queues.add(group, ref, row)
        letter_cells.add_to_cell(cells, (ref[0], error, slot), row.died_at, row.replays)
        waiting[ref[:2]] += 1
        exported += row.exported > 0
    letter_cells.move_cells(state.tables, group.group_id, LetterState.REPLAYING, cells)
    for (topic_id, partition), count in waiting.items():
        tp = TopicPartition(topic_id, partition)
        group.put_back[tp].end_record(end)
        group.retrying[tp] += count
    group.letters -= waiting.total()
    group.exported_letters -= exported
    state.groups.dirty_groups.add(group.group_id)


def abandon(
    state: State, group: ConsumerGroup, plan_id: int, letters: Iterable[MessageRef]
) -> None:
    """Apply: a plan's cursor has abandoned these letters, which it holds."""
    cells: CellChanges = {}
    count = exported = 0
    for ref in letters:
        row = _held(state, group, ref, plan_id)
        if row is None:
            continue
        error = letter_cells.error_of(row.error_type, row.fingerprint)
        cell = (ref[0], error, letter_cells.slot_at(row.died_at))
        letter_cells.add_to_cell(cells, cell, row.died_at, row.replays)
        count += 1
        exported += row.exported > 0
    letter_cells.move_cells(state.tables, group.group_id, LetterState.ABANDONED, cells)
    group.letters -= count
    group.exported_letters -= exported
    state.groups.dirty_groups.add(group.group_id)


def _held(
    state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int
) -> FailedMessage | None:
    """Return the row of an open letter that this plan has; None = it has another row,
    or the log has lost what became of it.
    """
    row = table_row(state, group.group_id, ref)
    held = (FailedKind.LETTER, plan_id, b"")
    return row if row is not None and (row.kind, row.plan, row.token) == held else None


def load_queues(state: State) -> None:
    """Make the queues of letters that plans have put back anew from the tables."""
    for plan in state.plans.by_id.values():
        group = state.groups.find(plan.group_id)
        if group is None or not plan.cursor or not plan.count(LetterOutcome.DELIVERED):
            continue
        for ref in plan_letters.untouched(state, plan.plan_id, b"", plan.cursor):
            row = _waiting(state, group, ref)
            if row is not None:
                put_back_queues.add(group, ref, row)
        for queue in group.put_back.values():
            queue.end_record(0)


def _waiting(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Return the row of a letter that is put back, and waits for a consumer."""
    if ref in group.leased_rows:
        return None
    row = failed_row(state, group.group_id, ref)
    return row if row is not None and _is_put_back(state, ref, row) else None


def take_from_queue(state: State, group: ConsumerGroup, ref: MessageRef) -> bool:
    """Apply: a letter that was put back goes to a consumer. Return False if the message
    is no such letter.
    """
    if not group.put_back or _waiting(state, group, ref) is None:
        return False
    put_back_queues.discard(group, ref)
    state.groups.dirty_groups.add(group.group_id)
    return True


def remove_processed(
    state: State, group: ConsumerGroup, refs: Iterable[MessageRef]
) -> list[MessageRef]:
    """Apply: leased letters that plans had put back are processed. Their plans say so,
    and their rows are removed later. Return the other messages, to be removed one by
    one.
    """
    if group.unfinished_clones:
        return list(refs)
    others: list[MessageRef] = []
    cells: dict[tuple[int, int, int], int] = {}
    done: dict[int, list[MessageRef]] = {}  # plan: its letters
    known = group.leased_letters
    for ref in refs:
        letter = known.pop(ref, None) or _plain_letter(state, group, ref)
        if letter is None:
            others.append(ref)
            continue
        plan, error, slot, _key_hash = letter
        done.setdefault(plan, []).append(ref)
        cell = (ref[0], error, slot)
        cells[cell] = cells.get(cell, 0) + 1
    for plan, letters in done.items():
        plan_letters.processed(state, plan, letters)
    letter_cells.count_processed(state.tables, group.group_id, cells)
    return others


def _plain_letter(state: State, group: ConsumerGroup, ref: MessageRef) -> PlainLetter | None:
    """Return what an ack has to know of a letter that its plan has put back; None = it
    is no such message, or more than its rows has to be forgotten.
    """
    row = failed_row(state, group.group_id, ref)
    if row is None or row.edits or row.copies or not _is_put_back(state, ref, row):
        return None
    return put_back_queues.plain_letter(row)


def swept_row(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Apply: sweep the letter, if it is processed or abandoned; return its row."""
    row = table_row(state, group.group_id, ref)
    if row is None or not row.plan:
        return row
    if is_over(state, ref, row):
        _sweep(state, group.group_id, ref, row)
        return None
    plan = _passed_by(state, ref, row)
    if plan is not None and _is_abandoned(plan, ref, row):
        return _write_abandoned(state, group.group_id, plan, ref, row)
    return row


def sweep_letters(state: State, plan_id: int, group_id: int, refs: Iterable[MessageRef]) -> None:
    """Apply: remove what is left of letters of a plan that are processed."""
    for ref in refs:
        row = table_row(state, group_id, ref)
        if row is not None and row.plan == plan_id:
            _sweep(state, group_id, ref, row)


def _sweep(state: State, group_id: int, ref: MessageRef, row: FailedMessage) -> None:
    """Apply: remove the rows of a processed letter, which nobody sees any more."""
    state.failed_messages.delete(t.FAILED_KEY.pack(group_id, *ref))
    state.letters.delete(t.LETTER_KEY.pack(group_id, row.number))
    letter = letter_of(ref, row)
    assert letter is not None, "it was a dead letter"
    index = state.tables[t.LETTER_INDEX]
    for place in letter_index.keys_of(group_id, letter):
        index.delete(place)


def sweep_abandoned(state: State, plan: Plan, group_id: int, refs: Iterable[MessageRef]) -> None:
    """Apply: let rows and indexes say that a plan has abandoned these letters, unless
    they have changed since.
    """
    for ref in refs:
        row = table_row(state, group_id, ref)
        if row is not None and row.plan == plan.plan_id and _passed_by(state, ref, row) is plan:
            _write_abandoned(state, group_id, plan, ref, row)


def _write_abandoned(
    state: State, group_id: int, plan: Plan, ref: MessageRef, row: FailedMessage
) -> FailedMessage:
    """Apply: let row and index say that a plan has abandoned the letter."""
    closed = _abandoned_row(plan, row)
    state.failed_messages.put(t.FAILED_KEY.pack(group_id, *ref), tuple(closed))
    letter = letter_of(ref, row)
    assert letter is not None, "it was open"
    letter_index.move(state.tables, group_id, letter, LetterState.ABANDONED)
    return closed
