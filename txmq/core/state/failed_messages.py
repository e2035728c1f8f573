"""Failed messages: retrying, parked behind a key fence, at a consumer, dead letters,
abandoned ones.

Table `moved` has a row for each. Its key is the message's place (group, topic,
partition, offset), which stays the same through retry, dead letter and replay. The row
points at the stored batch; nothing is copied. Only this module writes the indexes: a
retrying message is in `retries` and `wakes` while no member holds it, a parked one in
`parked`, one that a consumer's store has in `local`, dead letters and abandoned ones
are in `letters`.

A letter that its plan has put back keeps its row and its indexes until it ends or fails
(`put_back`). What this module returns is the retry that it is. Once it is processed, a
bit of its plan says so, and it is there no more: its rows are removed later (`sweep`).
A letter that a plan has abandoned keeps them as well until it is swept, or changes.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from txmq.core.state import (
    letter_copies,
    letter_edits,
    letter_index,
    local_stores,
    plan_blocks,
    plan_letters,
)
from txmq.core.state.letter_index import Letter, LetterState
from txmq.core.state.local_stores import StoredMessage
from txmq.core.state.plan_blocks import PlacedBlock
from txmq.core.state.plans import LetterOutcome
from txmq.core.state.positions import UNDELIVERED
from txmq.core.state.put_back import NO_KEY, PlainLetter, PutBackQueue, WaitingRun
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.plans import Plan
    from txmq.core.state.state import State

OFFSET_BYTES = 8  # of a column of offsets
# lost consumers after which a message goes out alone (`core/consumers/poison.py`)
ISOLATED_AFTER = 3


class FailedKind(IntEnum):
    """State of a failed message; the numbers are on disk."""

    RETRY = 1  # waits for its next delivery, or is leased
    PARKED = 2  # waits behind the fence of its key
    LETTER = 3  # a dead letter
    ABANDONED = 4  # a dead letter that an operator has closed
    LOCAL = 5  # a consumer has it in its local store, and retries it there


DELIVERABLE = (FailedKind.RETRY, FailedKind.PARKED, FailedKind.LOCAL)
CLOSED = (FailedKind.LETTER, FailedKind.ABANDONED)
PROCESSED = ""  # why a message is no failed message any more; otherwise a reason


class FailedMessage(NamedTuple):
    """A row of table `moved`.

    `attempt` is the number of counted deliveries since the last replay, `deaths` the
    number of consumers that were lost with the message (`core/consumers/poison.py`).
    `position`, `length` and `row` point at the message; `visible_at` and `stored_at`
    are those of its batch. `token` is the undecided transaction that acks or replays
    it. `number` is its number among the group's dead letters. `store` is the id of the
    consumer's store that has it, `plan` that of the replay plan that it belongs to
    until its outcome. `edits` is the number of times that its letter was edited: then
    `position` is that of another batch than the published one. `copies` is the number
    of its copies in other topics. `exported` is the time of the export that has this
    death of this version. `trial_by` is the member that alone gets the message, for one
    delivery. `given_by` is the group whose dead letter it is, and by which an operator
    gave it to this one.
    """

    kind: int
    attempt: int
    due: int
    key_hash: int | None
    position: int
    length: int
    row: int
    visible_at: int
    stored_at: int
    consumer: str = ""
    error_type: str = ""
    error_text: str = ""
    fingerprint: str = ""
    first_failed_at: int = 0
    dead_at: int = 0
    number: int = 0
    replays: int = 0
    deaths: int = 0
    token: bytes = b""
    reason: str = ""
    store: bytes = b""
    plan: int = 0
    edits: int = 0
    copies: int = 0
    exported: int = 0
    trial_by: str = ""
    given_by: str = ""


FIELDS = FailedMessage._fields
PLAN = FIELDS.index("plan")


class Move(NamedTuple):
    """Part of an event: the new row of a message, wherever the message was before."""

    topic_id: int
    partition: int
    offset: int
    row: FailedMessage


def letter_state(row: FailedMessage) -> LetterState | None:
    """Return the state of a dead letter, of a message that was one, or that a
    consumer's store has; None = any other failed message.
    """
    if row.kind == FailedKind.ABANDONED:
        return LetterState.ABANDONED
    if row.kind == FailedKind.LETTER and not row.token:
        return LetterState.OPEN
    if row.kind == FailedKind.LOCAL:
        return LetterState.LOCAL
    return LetterState.REPLAYING if row.number else None


def letter_of(ref: MessageRef, row: FailedMessage) -> Letter | None:
    """Return what the index of letters knows of a message; None = it is no letter."""
    state = letter_state(row)
    return (
        None
        if state is None
        else Letter(
            state,
            *ref,
            row.dead_at or row.first_failed_at,
            row.number,
            row.key_hash,
            row.error_type,
            row.fingerprint,
            row.replays,
        )
    )


def new_row(
    entry: t.BatchEntry, row: int, key_hash: int | None, *, attempt: int, deaths: int = 0
) -> FailedMessage:
    """Return the row of a message of a published batch. The caller sets its kind."""
    return FailedMessage(
        FailedKind.RETRY,
        attempt,
        0,
        key_hash,
        entry.position,
        entry.length,
        row,
        entry.visible_at,
        entry.stored_at,
        deaths=deaths,
    )


def given_row(
    letter: FailedMessage, position: int, length: int, row: int, group: str
) -> FailedMessage:
    """Return the row of another group that gets a dead letter of this `group`."""
    return FailedMessage(
        FailedKind.RETRY,
        0,
        0,
        letter.key_hash,
        position,
        length,
        row,
        letter.visible_at,
        letter.stored_at,
        given_by=group,
    )


def decode_move(move: Any) -> Move:  # noqa: ANN401  # tuples come back from the log without types
    """Return a `Move` of an event from the log."""
    topic_id, partition, offset, row = move
    return Move(topic_id, partition, offset, FailedMessage(*row))


def get(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Return the row of a message if it has failed."""
    row = _stored(state, group, ref)
    return None if row is None else current(state, group, ref, row)


def planned(
    state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int
) -> FailedMessage | None:
    """Return the row of a message that this plan has not come to yet."""
    row = _raw(state, group, ref)
    if row is None or row.plan == plan_id:
        return row  # neither put back nor processed since
    return get(state, group, ref)


def _stored(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    row = _raw(state, group, ref)
    return None if row is None or is_over(state, ref, row) else row


def _raw(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    row: Any = state.failed_messages.get(t.FAILED_KEY.pack(group.group_id, *ref))
    if row is None:
        return None
    # as fast as it gets: this is done for millions. Rows of older versions are shorter.
    whole = len(row) == len(FIELDS)
    return tuple.__new__(FailedMessage, row) if whole else FailedMessage(*row)


def is_over(state: State, ref: MessageRef, row: FailedMessage) -> bool:
    """Return True if a row of table `moved` is that of a letter that is processed since
    its plan has put it back.
    """
    return row.plan > 0 and plan_letters.is_unswept(state, row.plan, ref)


def current(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage
) -> FailedMessage:
    """Return what a row of table `moved` stands for: a letter that its plan has put
    back is a retry. The same row = its plan has not come to it, if there is one.
    """
    passed_by = _passed_by(state, ref, row)
    if passed_by is None:
        return row
    if _is_abandoned(passed_by, ref, row):
        return _closed(passed_by, row)
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
    return _key(ref, row) <= plan.abandoned


def _closed(plan: Plan, row: FailedMessage) -> FailedMessage:
    return row._replace(kind=FailedKind.ABANDONED, plan=0, reason=plan.reason)


def _is_put_back(state: State, ref: MessageRef, row: FailedMessage) -> bool:
    plan = _passed_by(state, ref, row)
    return plan is not None and not _is_abandoned(plan, ref, row)


def replayed_row(row: FailedMessage, **changes: Any) -> FailedMessage:  # noqa: ANN401  # fields
    """Return the row of a dead letter that is replayed.

    Attempts and consumer deaths count from zero again; replays go on counting. A plan
    that has ended without it has nothing to do with it any more.
    """
    fields: dict[str, Any] = {"attempt": 0, "deaths": 0, "token": b"", "plan": 0}
    return row._replace(**(fields | changes), replays=row.replays + 1)


def put_back(
    state: State,
    group: ConsumerGroup,
    plan_id: int,
    letters: Iterable[MessageRef | PlacedBlock],
    end: int,
) -> None:
    """Apply: a plan's cursor has passed these letters, by a record that ends there in
    the log.
    """
    cells: dict[letter_index.CellKey, letter_index.CellChange] = {}
    waiting, exported = Counter[tuple[int, int]](), 0
    for one in letters:
        if isinstance(one, PlacedBlock):
            exported += _put_back_block(state, group, plan_id, one, cells, waiting)
            continue
        row = _held(state, group, one, plan_id)
        if row is None:
            continue
        error, slot = _add_to_queue(group, one, row)
        died_at = row.dead_at or row.first_failed_at
        letter_index.add_to_cell(cells, (one[0], error, slot), died_at, row.replays)
        waiting[one[:2]] += 1
        exported += row.exported > 0
    letter_index.move_cells(state.tables, group.group_id, LetterState.REPLAYING, cells)
    for (topic_id, partition), count in waiting.items():
        tp = TopicPartition(topic_id, partition)
        group.put_back[tp].end_record(end)
        group.retrying[tp] += count
    group.letters -= waiting.total()
    group.exported_letters -= exported
    state.groups.dirty_groups.add(group.group_id)


def abandon(
    state: State, group: ConsumerGroup, plan_id: int, letters: Iterable[MessageRef | PlacedBlock]
) -> None:
    """Apply: a plan's cursor has abandoned these letters, which it holds."""
    cells: dict[letter_index.CellKey, letter_index.CellChange] = {}
    count = exported = 0
    for one in letters:
        if isinstance(one, PlacedBlock):
            _add_cells(cells, one)
            count += one.block.letters
            exported += one.block.exported
            continue
        row = _held(state, group, one, plan_id)
        if row is None:
            continue
        error = letter_index.error_of(row.error_type, row.fingerprint)
        died_at = row.dead_at or row.first_failed_at
        cell = (one[0], error, letter_index.slot_at(died_at))
        letter_index.add_to_cell(cells, cell, died_at, row.replays)
        count += 1
        exported += row.exported > 0
    letter_index.move_cells(state.tables, group.group_id, LetterState.ABANDONED, cells)
    group.letters -= count
    group.exported_letters -= exported
    state.groups.dirty_groups.add(group.group_id)


def _held(
    state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int
) -> FailedMessage | None:
    """Return the row of an open letter that this plan has; None = it has another row,
    or the log has lost what became of it.
    """
    row = _raw(state, group, ref)
    held = (FailedKind.LETTER, plan_id, b"")
    return row if row is not None and (row.kind, row.plan, row.token) == held else None


def _add_cells(
    cells: dict[letter_index.CellKey, letter_index.CellChange], placed: PlacedBlock
) -> None:
    for topic_id, error, slot, *change in placed.block.cells:
        letter_index.merge_cell(cells, (topic_id, error, slot), *change)


def _put_back_block(
    state: State,
    group: ConsumerGroup,
    plan_id: int,
    placed: PlacedBlock,
    cells: dict[letter_index.CellKey, letter_index.CellChange],
    waiting: Counter[tuple[int, int]],
) -> int:
    """Apply: add the letters of a block to their queues. Return the number of those
    that an export has.
    """
    block = placed.block
    for run in block.runs:
        tp = (run.topic_id, run.partition)
        _queue_of(group, tp).extend(plan_id, run)
        waiting[tp] += len(run.offsets) // OFFSET_BYTES
    _add_cells(cells, placed)
    plan_blocks.remove(state, placed.key)
    return block.exported


def open_letter(
    state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int
) -> FailedMessage | None:
    """Return the row of a letter that this plan can put back, and whose ack will need
    nothing but to be counted.
    """
    row = _held(state, group, ref, plan_id)
    return None if row is None or _has_more(row) else row


def _has_more(row: FailedMessage) -> bool:
    """Return True if the ack of a letter has to read its row."""
    return bool(row.edits or row.copies or row.key_hash == NO_KEY)


def _add_to_queue(group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> tuple[int, int]:
    """Apply: a letter waits for a consumer. Return its error and slot in the index."""
    letter = _plain(row)
    _queue_of(group, ref[:2]).add(ref[2], row.position, None if _has_more(row) else letter)
    return letter.error, letter.slot


def _queue_of(group: ConsumerGroup, tp: tuple[int, int]) -> PutBackQueue:
    queue = group.put_back.get(tp)  # type: ignore[call-overload]  # equal to a TopicPartition
    if queue is None:
        queue = group.put_back[TopicPartition(*tp)] = PutBackQueue(keyed=group.ordered)
    return cast("PutBackQueue", queue)


def _plain(row: FailedMessage) -> PlainLetter:
    error = letter_index.error_of(row.error_type, row.fingerprint)
    slot = letter_index.slot_at(row.dead_at or row.first_failed_at)
    return PlainLetter(row.plan, error, slot, row.key_hash)


def load_queues(state: State) -> None:
    """Make the queues of letters that plans have put back anew from the tables."""
    for plan in state.plans.by_id.values():
        group = state.groups.find(plan.group_id)
        if group is None or not plan.cursor or not plan.count(LetterOutcome.DELIVERED):
            continue
        for key, letter in plan_letters.rows_of(state, plan.plan_id, last=plan.cursor):
            if letter[0] == LetterOutcome.PLANNED:
                ref: Any = t.PLAN_LETTER_KEY.unpack(key)[2:]
                row = _waiting(state, group, ref)
                if row is not None:
                    _add_to_queue(group, ref, row)
        for queue in group.put_back.values():
            queue.end_record(0)


def before_failure(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Apply: return the row of a message that fails now, if it had failed before. What
    is left of a letter that was processed in an earlier life goes first.
    """
    row = _swept(state, group, ref)
    return None if row is None else current(state, group, ref, row)


def _swept(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Apply: sweep the letter, if it is processed or abandoned; return its row."""
    row = _raw(state, group, ref)
    if row is None or not row.plan:
        return row
    if is_over(state, ref, row):
        sweep(state, group.group_id, [(ref, row)])
        return None
    plan = _passed_by(state, ref, row)
    if plan is not None and _is_abandoned(plan, ref, row):
        return _close(state, group.group_id, plan, ref, row)
    return row


def _close(
    state: State, group_id: int, plan: Plan, ref: MessageRef, row: FailedMessage
) -> FailedMessage:
    """Apply: let row and index say that a plan has abandoned the letter."""
    closed = _closed(plan, row)
    state.failed_messages.put(t.FAILED_KEY.pack(group_id, *ref), tuple(closed))
    letter = letter_of(ref, row)
    assert letter is not None, "it was open"
    letter_index.move(state.tables, group_id, letter, LetterState.ABANDONED)
    return closed


def _waiting(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Return the row of a letter that is put back, and waits for a consumer."""
    if ref in group.leased_rows:
        return None
    row = _stored(state, group, ref)
    return row if row is not None and _is_put_back(state, ref, row) else None


def run_at(group: ConsumerGroup, tp: TopicPartition, start: int, count: int) -> WaitingRun | None:
    """Return what is known of the letters at these offsets that plans have put back;
    None = not all of them wait.
    """
    queue = group.put_back.get(tp)
    return None if queue is None else queue.run_at(start, count)


def key_of(state: State, group: ConsumerGroup, ref: MessageRef) -> int | None:
    """Return the hash of the key of a leased failed message."""
    letter = group.leased_letters.get(ref)
    if letter is not None:
        return letter.key_hash
    row = get(state, group, ref)
    return None if row is None else row.key_hash


def take_run(state: State, group: ConsumerGroup, refs: list[MessageRef]) -> bool:
    """Apply: neighbours that plans have put back go to a consumer. Return False if not
    all of them are such letters, near the front of their queue.
    """
    tp = TopicPartition(refs[0][0], refs[0][1])
    queue = group.put_back.get(tp)
    letters = None if queue is None else queue.take(refs[0][2], len(refs))
    if queue is None or letters is None:
        return False
    known = zip(refs, letters, strict=True)
    group.leased_letters.update((ref, letter) for ref, letter in known if letter is not None)
    if not queue:
        del group.put_back[tp]
    _count_retry(group, tp, -len(refs))
    state.groups.dirty_groups.add(group.group_id)
    return True


def take_from_queue(state: State, group: ConsumerGroup, ref: MessageRef) -> bool:
    """Apply: a letter that was put back goes to a consumer. Return False if the message
    is no such letter.
    """
    if not group.put_back or _waiting(state, group, ref) is None:
        return False
    _leave_queue(group, ref)
    state.groups.dirty_groups.add(group.group_id)
    return True


def _leave_queue(group: ConsumerGroup, ref: MessageRef) -> None:
    tp = TopicPartition(ref[0], ref[1])
    queue = group.put_back[tp]
    queue.discard(ref[2])
    if not queue:
        del group.put_back[tp]
    _count_retry(group, tp, -1)


def _count_retry(group: ConsumerGroup, tp: TopicPartition, change: int) -> None:
    group.retrying[tp] += change
    if not group.retrying[tp]:
        del group.retrying[tp]


def put(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> None:
    """Apply: set the row and its indexes, after `drop` of an earlier row."""
    if row.plan and row.kind in CLOSED:
        row = _tell_plan(state, ref, row)
    state.failed_messages.put(t.FAILED_KEY.pack(group.group_id, *ref), tuple(row))
    letter = letter_of(ref, row)
    if letter is not None:
        letter_index.add(state.tables, group.group_id, letter)
    if row.kind == FailedKind.RETRY:
        if ref not in group.leased_rows and not row.token:
            _index_retry(state, group, ref, row)
    elif row.kind == FailedKind.PARKED:
        state.tables[t.PARKED].put(_parked_key(group, ref, row), ())
        _count_parked(state, group, ref, row, 1)
    elif row.kind == FailedKind.LOCAL:
        local_stores.add_message(state, group, ref, _at_store(row))
    else:
        state.letters.put(t.LETTER_KEY.pack(group.group_id, row.number), ref)
        _count_letters(state, group, row, 1)


def _tell_plan(state: State, ref: MessageRef, row: FailedMessage) -> FailedMessage:
    """Apply: record the outcome of a letter of a plan. Return the row without the plan
    where that was the last thing it had to know.
    """
    if row.kind == FailedKind.ABANDONED:
        plan_letters.ended(state, row.plan, row.visible_at, ref, plan_letters.ABANDONED)
    elif not plan_letters.died(state, row.plan, row.visible_at, ref, row.number, row.fingerprint):
        return row
    return row._replace(plan=0)


def set_plan(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage, plan_id: int
) -> None:
    """Apply: an open letter with this row belongs to a plan from now on."""
    plan_blocks.forget(state, row.plan, row.visible_at, ref)
    held = (*row[:PLAN], plan_id, *row[PLAN + 1 :])
    state.failed_messages.put(t.FAILED_KEY.pack(group.group_id, *ref), held)


def _rewrite(
    state: State,
    group: ConsumerGroup,
    ref: MessageRef,
    row: FailedMessage,
    **changes: Any,  # noqa: ANN401  # fields
) -> None:
    """Apply: change fields of a row that no index has."""
    change_fields(state, (group.group_id, *ref), row, row._replace(**changes))


def change_fields(
    state: State, at: tuple[int, int, int, int], row: FailedMessage, to: FailedMessage
) -> None:
    """Apply: change fields of a row that no index has. `at` is the group's id with the
    message's place.
    """
    plan_blocks.forget(state, row.plan, row.visible_at, at[1:])
    state.failed_messages.put(t.FAILED_KEY.pack(*at), tuple(to))


def leave_plan(state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int) -> None:
    """Apply: a message belongs to this plan no more, if it did."""
    stored = _stored(state, group, ref)
    if stored is None or stored.plan != plan_id:
        return
    row = current(state, group, ref, stored)
    if row is stored:
        _rewrite(state, group, ref, row, plan=0)
    else:
        drop(state, group, ref)
        put(state, group, ref, row._replace(plan=0))


def drop(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Apply: remove the row and its indexes before another `put`, and return it."""
    group.leased_letters.pop(ref, None)
    stored = _swept(state, group, ref)
    if stored is None:
        return None
    row = current(state, group, ref, stored)
    plan_blocks.forget(state, stored.plan, stored.visible_at, ref)
    state.failed_messages.delete(t.FAILED_KEY.pack(group.group_id, *ref))
    letter = letter_of(ref, stored)
    if letter is not None:
        counted = letter if row is stored else letter_of(ref, row)
        letter_index.discard(state.tables, group.group_id, letter, counted)
    if group.unfinished_clones and row.kind in DELIVERABLE:
        keep_for_clones(state, group, ref)
    if row is not stored:
        state.letters.delete(t.LETTER_KEY.pack(group.group_id, row.number))
        if ref not in group.leased_rows:
            _leave_queue(group, ref)
        state.groups.dirty_groups.add(group.group_id)
    elif row.kind == FailedKind.RETRY:
        if ref not in group.leased_rows and not row.token:
            _unindex_retry(state, group, ref, row.due)
    elif row.kind == FailedKind.PARKED:
        state.tables[t.PARKED].delete(_parked_key(group, ref, row))
        _count_parked(state, group, ref, row, -1)
    elif row.kind == FailedKind.LOCAL:
        local_stores.remove_message(state, group, ref, _at_store(row))
    else:
        state.letters.delete(t.LETTER_KEY.pack(group.group_id, row.number))
        _count_letters(state, group, row, -1)
    return row


def remove(
    state: State, group: ConsumerGroup, ref: MessageRef, why: str = PROCESSED
) -> FailedMessage | None:
    """Apply: remove the row, its indexes and its edits, for good, and tell its plan
    why.

    The history goes, too, unless this was a dead letter that is processed now.
    """
    row = drop(state, group, ref)
    if row is not None and row.plan:
        plan_letters.ended(state, row.plan, row.visible_at, ref, why)
    if row is not None and row.trial_by:
        state.trials.note(group.group_id, ref, row.number, why)
    if row is not None and not (why == PROCESSED and (row.dead_at or row.replays)):
        state.tables[t.ATTEMPTS].delete(t.FAILED_KEY.pack(group.group_id, *ref))
    if row is not None and row.edits:
        letter_edits.forget(state, (group.group_id, *ref))
    if row is not None and row.copies:
        letter_copies.forget(state, (group.group_id, *ref))
    return row


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
    letter_index.count_processed(state.tables, group.group_id, cells)
    return others


def _plain_letter(state: State, group: ConsumerGroup, ref: MessageRef) -> PlainLetter | None:
    """Return what an ack has to know of a letter that its plan has put back; None = it
    is no such message, or more than its rows has to be forgotten.
    """
    row = _stored(state, group, ref)
    if row is None or row.edits or row.copies or not _is_put_back(state, ref, row):
        return None
    return _plain(row)


def sweep_letters(state: State, plan_id: int, group_id: int, refs: Iterable[MessageRef]) -> None:
    """Apply: remove what is left of letters of a plan that are processed."""
    rows: list[tuple[MessageRef, FailedMessage]] = []
    for ref in refs:
        found: Any = state.failed_messages.get(t.FAILED_KEY.pack(group_id, *ref))
        if found is not None and (row := FailedMessage(*found)).plan == plan_id:
            rows.append((ref, row))
    sweep(state, group_id, rows)


def sweep(state: State, group_id: int, rows: Iterable[tuple[MessageRef, FailedMessage]]) -> None:
    """Apply: remove the rows of processed letters, which nobody sees any more."""
    tables = state.tables
    index = tables[t.LETTER_INDEX]
    for ref, row in rows:
        state.failed_messages.delete(t.FAILED_KEY.pack(group_id, *ref))
        state.letters.delete(t.LETTER_KEY.pack(group_id, row.number))
        letter = letter_of(ref, row)
        assert letter is not None, "it was a dead letter"
        for place in letter_index.keys_of(group_id, letter):
            index.delete(place)


def sweep_abandoned(state: State, plan: Plan, group_id: int, refs: Iterable[MessageRef]) -> None:
    """Apply: let rows and indexes say that a plan has abandoned these letters, unless
    they have changed since.
    """
    for ref in refs:
        found: Any = state.failed_messages.get(t.FAILED_KEY.pack(group_id, *ref))
        row = None if found is None else FailedMessage(*found)
        if row is not None and row.plan == plan.plan_id and _passed_by(state, ref, row) is plan:
            _close(state, group_id, plan, ref, row)


def _at_store(row: FailedMessage) -> StoredMessage:
    return StoredMessage(row.store, row.attempt, row.first_failed_at)


def _index_retry(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> None:
    (topic_id, partition, offset), due = ref, row.due
    if row.deaths >= ISOLATED_AFTER:
        group.isolated_rows[ref] = due
    state.tables[t.RETRIES].put(
        t.RETRY_KEY.pack(group.group_id, topic_id, partition, due, offset), ()
    )
    state.tables[t.RETRIES_BY_TIME].put(t.RETRY_TIME_KEY.pack(due, group.group_id, *ref), ())
    group.retrying[TopicPartition(topic_id, partition)] += 1
    state.groups.dirty_groups.add(group.group_id)


def _unindex_retry(state: State, group: ConsumerGroup, ref: MessageRef, due: int) -> None:
    topic_id, partition, offset = ref
    group.isolated_rows.pop(ref, None)
    state.tables[t.RETRIES].delete(
        t.RETRY_KEY.pack(group.group_id, topic_id, partition, due, offset)
    )
    state.tables[t.RETRIES_BY_TIME].delete(t.RETRY_TIME_KEY.pack(due, group.group_id, *ref))
    _count_retry(group, TopicPartition(topic_id, partition), -1)
    state.groups.dirty_groups.add(group.group_id)


def _parked_key(group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> bytes:
    # In the order of publication: offsets do not give it where a key has been in two
    # partitions.
    topic_id, partition, offset = ref
    assert row.key_hash is not None, "parked messages have a key"
    return t.PARKED_KEY.pack(
        group.group_id, topic_id, row.key_hash + t.SIGN, row.visible_at, partition, offset
    )


def _count_parked(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage, change: int
) -> None:
    fence = group.fence(ref[0], row.key_hash)
    if fence is not None and row.key_hash is not None:
        fence.parked += change
        state.groups.dirty_fences.add((group.group_id, ref[0], row.key_hash))


def _count_letters(state: State, group: ConsumerGroup, row: FailedMessage, change: int) -> None:
    if row.kind == FailedKind.LETTER:
        group.letters += change
        group.exported_letters += change * (row.exported > 0)
        state.groups.dirty_groups.add(group.group_id)


def set_exported(state: State, group: ConsumerGroup, ref: MessageRef, at: int) -> None:
    """Apply: an export has this dead letter since then; no index knows of it."""
    row = _swept(state, group, ref)
    assert row is not None, "the decision has found it"
    _rewrite(state, group, ref, row, exported=at)
    if row.kind == FailedKind.LETTER and not row.exported:
        group.exported_letters += 1
        state.groups.dirty_groups.add(group.group_id)


def count_exported(state: State) -> None:
    """Count what older versions did not."""
    for group in state.groups.by_id.values():
        if group.exported_letters < 0:
            refs = messages_of_group(state, group, None) if group.letters else ()
            rows = (get(state, group, ref) for ref in refs)
            open_ones = (row for row in rows if row is not None and row.kind == FailedKind.LETTER)
            group.exported_letters = sum(row.exported > 0 for row in open_ones)
            state.groups.dirty_groups.add(group.group_id)


def rows_between(
    state: State,
    group: ConsumerGroup,
    tp: TopicPartition,
    start: int,
    end: int,
    most: int | None = None,
) -> list[tuple[MessageRef, FailedMessage]]:
    """Return the failed messages of a partition with start <= offset < end, in order,
    and `most` of them at most.
    """
    low, high = (
        t.FAILED_KEY.pack(group.group_id, *tp, min(offset, t.SIGN)) for offset in (start, end)
    )
    rows = _found(state, group, state.failed_messages.range(low, high))
    return list(islice(rows, most))


def _found(
    state: State, group: ConsumerGroup, rows: Iterable[tuple[bytes, Any]]
) -> Iterator[tuple[MessageRef, FailedMessage]]:
    for key, row in rows:
        _group_id, topic_id, partition, offset = t.FAILED_KEY.unpack(key)
        ref, stored = (topic_id, partition, offset), FailedMessage(*row)
        if not is_over(state, ref, stored):
            yield ref, current(state, group, ref, stored)


def last_rows_before(
    state: State, group: ConsumerGroup, tp: TopicPartition, start: int, end: int, most: int
) -> list[tuple[MessageRef, FailedMessage]]:
    """Return the last failed messages of a partition with start <= offset < end, in
    order, and `most` of them at most.
    """
    low, high = (
        t.FAILED_KEY.pack(group.group_id, *tp, min(offset, t.SIGN)) for offset in (start, end)
    )
    rows = _found(state, group, state.failed_messages.range(low, high, reverse=True))
    return list(islice(rows, most))[::-1]


def messages_of_group(
    state: State, group: ConsumerGroup, most: int | None, start: MessageRef = (0, 0, 0)
) -> list[MessageRef]:
    """Return the failed messages of a group in order, from `start` on, and `most` of
    them at most. Among them are letters that are processed, and not swept yet.
    """
    low, high = (
        t.FAILED_KEY.pack(group.group_id, *start),
        t.FAILED_KEY.pack(group.group_id + 1, 0, 0, 0),
    )
    return [
        t.FAILED_KEY.unpack(key)[1:]
        for key, _row in islice(state.failed_messages.range(low, high), most)
    ]


def due_rows(
    state: State, group: ConsumerGroup, tp: TopicPartition, now: int
) -> Iterator[tuple[MessageRef, FailedMessage]]:
    """Yield the messages of a partition that are due, longest due first, but for those
    that plans have put back (`put_back_runs`).
    """
    start = t.RETRY_KEY.pack(group.group_id, *tp, 0, 0)
    stop = t.RETRY_KEY.pack(group.group_id, *tp, now + 1, 0)
    for key, _row in state.tables[t.RETRIES].range(start, stop):
        ref = (*tp, t.RETRY_KEY.unpack(key)[4])
        row = get(state, group, ref)
        assert row is not None, "the index has it"
        yield ref, row


def put_back_runs(
    state: State, group: ConsumerGroup, tp: TopicPartition, most: int
) -> Iterator[tuple[MessageRef, FailedMessage, int]]:
    """Yield the letters of a partition that plans have put back, neighbours of a batch
    together: the first one with its row, and their number.

    Retention may have copied them since, each to a batch of its own. The queue knows
    their former batch, which is there as long as a row points at it.
    """
    queue = group.put_back.get(tp)
    for start, count, position in () if queue is None else queue.runs(most):
        ref, row = _queued(state, group, tp, start)
        if row.position == position:
            yield ref, row, count
            continue
        yield ref, row, 1
        for offset in range(start + 1, start + count):
            yield *_queued(state, group, tp, offset), 1


def _queued(
    state: State, group: ConsumerGroup, tp: TopicPartition, offset: int
) -> tuple[MessageRef, FailedMessage]:
    ref = (*tp, offset)
    row = get(state, group, ref)
    assert row is not None, "the queue has it"
    return ref, row


def first_parked(
    state: State, group: ConsumerGroup, topic_id: int, key_hash: int
) -> tuple[MessageRef, FailedMessage] | None:
    """Return the earliest message that is parked behind a key's fence."""
    start = t.PARKED_KEY.pack(group.group_id, topic_id, key_hash + t.SIGN, 0, 0, 0)
    stop = t.PARKED_KEY.pack(group.group_id, topic_id, key_hash + t.SIGN, t.SIGN, 0, 0)
    for key, _row in state.tables[t.PARKED].range(start, stop):
        ref = (topic_id, *t.PARKED_KEY.unpack(key)[4:6])
        row = get(state, group, ref)
        assert row is not None, "the index has it"
        return ref, row
    return None


def redeliver_in_clone(state: State, clone: ConsumerGroup, ref: MessageRef) -> None:
    """Apply: deliver a failed message of the source group in its clone, too.

    Messages at or above the clone's cursor are still to be delivered there anyway.
    Those below its floor were dead letters beyond retention when the clone began.
    """
    topic_id, partition, offset = ref
    tp = TopicPartition(topic_id, partition)
    position = clone.positions.get(tp)
    if position is None or not position.floor <= offset < position.cursor:
        return
    position = state.groups.position_for_update(clone, tp)
    position.settled.cut(offset, offset + 1)
    position.redeliver.put(offset, offset + 1, UNDELIVERED)


def keep_for_clones(state: State, source: ConsumerGroup, ref: MessageRef) -> None:
    """Apply: before a deliverable message loses its row, deliver it in those clones in
    the making that have not copied it yet.
    """
    for group_id in source.unfinished_clones:
        clone = state.groups.by_id[group_id]
        if clone.clone_progress is not None and ref >= clone.clone_progress.start:
            redeliver_in_clone(state, clone, ref)
