"""Letters that the cursor of their replay plan passes: put back, or abandoned.

Passing a letter changes neither its row nor its places in the index, only counts and
queues (docs/decisions/0093). The row itself changes when the letter fails or is edited,
and when it is swept. Once a letter that was put back is processed, a bit of its plan
says so. It is no failed message any more, and its rows wait to be swept.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from txmq.core.state import failed_messages, letter_cells, plan_letters, put_back_queues
from txmq.core.state.failed_messages import Standing
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.letter_cells import CellChanges, LetterState
from txmq.core.state.plans import LetterOutcome
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.put_back import PlainLetter
    from txmq.core.state.state import State


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
    passed, exported = Counter[tuple[int, int]](), 0
    for ref in letters:
        row = _held(state, group, ref, plan_id)
        if row is None:
            continue
        error = letter_cells.error_of(row.error_type, row.fingerprint)
        cell = (ref[0], error, letter_cells.slot_at(row.died_at))
        letter_cells.add_to_cell(cells, cell, row.died_at, row.replays)
        passed[ref[:2]] += 1
        exported += row.exported > 0
    letter_cells.move_cells(state.tables, group.group_id, LetterState.ABANDONED, cells)
    group.letters -= passed.total()
    _count_closed(state, group, passed)
    group.exported_letters -= exported


def _count_closed(state: State, group: ConsumerGroup, closed: Counter[tuple[int, int]]) -> None:
    """Apply: failed messages are abandoned or processed; their rows change later."""
    for (topic_id, partition), count in closed.items():
        group.count_failed(topic_id, partition, -count)
    state.groups.dirty_groups.add(group.group_id)


def _held(
    state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int
) -> FailedMessage | None:
    """Return the row of an open letter that this plan has; None = it has another row,
    or the log has lost what became of it.
    """
    row = failed_messages.stored(state, group.group_id, ref)
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
    return None if ref in group.leased_rows else _put_back(state, group, ref)


def _put_back(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Return the row of a letter that is put back."""
    row = failed_messages.stored(state, group.group_id, ref)
    if row is None or failed_messages.standing(state, ref, row) is not Standing.PUT_BACK:
        return None
    return row


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
        _count_closed(state, group, Counter(ref[:2] for ref in letters))
    letter_cells.count_processed(state.tables, group.group_id, cells)
    return others


def _plain_letter(state: State, group: ConsumerGroup, ref: MessageRef) -> PlainLetter | None:
    """Return what an ack has to know of a letter that its plan has put back; None = it
    is no such message, or more than its rows has to be forgotten.
    """
    row = _put_back(state, group, ref)
    if row is None or row.edits or row.copies:
        return None
    return put_back_queues.plain_letter(row)
