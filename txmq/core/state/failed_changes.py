"""Changes of failed messages: the only writer of their rows and indexes.

A retrying message is in `retries` and `retries_by_time` while no member holds it, a
parked one in `parked`, one that a consumer's store has in `local`, dead letters and
abandoned ones are in `letters`. Letters that a plan passes keep all that until they are
swept (`passed_letters`, `sweep`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.state import (
    failed_messages,
    letter_copies,
    letter_edits,
    letter_index,
    local_stores,
    plan_letters,
    put_back_queues,
)
from txmq.core.state.failed_messages import Standing
from txmq.core.state.failed_rows import CLOSED, DELIVERABLE, FailedKind, abandoned_row, letter_of
from txmq.core.state.letter_cells import LetterState
from txmq.core.state.local_stores import StoredMessage
from txmq.core.state.positions import UNDELIVERED
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

PROCESSED = ""  # why a message is no failed message any more; otherwise a reason


def put(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> None:
    """Apply: set the row and its indexes, after `drop` of an earlier row."""
    if row.plan and row.kind in CLOSED:
        row = _tell_plan(state, ref, row)
    state.failed_messages.put(t.FAILED_KEY.pack(group.group_id, *ref), tuple(row))
    letter = letter_of(ref, row)
    if letter is not None:
        letter_index.add(state.tables, group.group_id, letter)
    _count(state, group, ref, row, 1)
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


def change_fields(state: State, group_id: int, ref: MessageRef, row: FailedMessage) -> None:
    """Apply: give a message a row of which only fields have changed that no index
    has.
    """
    state.failed_messages.put(t.FAILED_KEY.pack(group_id, *ref), tuple(row))


def leave_plan(state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int) -> None:
    """Apply: a message belongs to this plan no more, if it did."""
    row = sweep(state, group.group_id, ref)
    if row is None or row.plan != plan_id:
        return
    now = failed_messages.seen(state, group, ref, row)
    if now is None or now is row:
        change_fields(state, group.group_id, ref, row._replace(plan=0))
    else:
        drop(state, group, ref)
        put(state, group, ref, now._replace(plan=0))


def sweep(state: State, group_id: int, ref: MessageRef) -> FailedMessage | None:
    """Apply: let rows and indexes say so, if a plan's letter is processed or abandoned.
    Return the row of the message, if it has one then.
    """
    row = failed_messages.stored(state, group_id, ref)
    if row is None:
        return None
    now = failed_messages.standing(state, ref, row)
    if now is not Standing.PROCESSED and now is not Standing.ABANDONED:
        return row
    letter = letter_of(ref, row)
    assert letter is not None, "it was a dead letter"
    if now is Standing.ABANDONED:
        row = abandoned_row(row, state.plans.by_id[row.plan].reason)
        change_fields(state, group_id, ref, row)
        letter_index.move(state.tables, group_id, letter, LetterState.ABANDONED)
        return row
    state.failed_messages.delete(t.FAILED_KEY.pack(group_id, *ref))
    state.letters.delete(t.LETTER_KEY.pack(group_id, row.number))
    for place in letter_index.keys_of(group_id, letter):
        state.tables[t.LETTER_INDEX].delete(place)
    return None


def drop(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Apply: remove the row and its indexes before another `put`, and return it."""
    group.leased_letters.pop(ref, None)
    stored = sweep(state, group.group_id, ref)
    if stored is None:
        return None
    row = failed_messages.seen(state, group, ref, stored)
    assert row is not None, "a processed letter was swept"
    state.failed_messages.delete(t.FAILED_KEY.pack(group.group_id, *ref))
    letter = letter_of(ref, stored)
    if letter is not None:
        counted = letter if row is stored else letter_of(ref, row)
        letter_index.discard(state.tables, group.group_id, letter, counted)
    _count(state, group, ref, row, -1)
    if group.unfinished_clones and row.kind in DELIVERABLE:
        keep_for_clones(state, group, ref)
    if row is not stored:
        state.letters.delete(t.LETTER_KEY.pack(group.group_id, row.number))
        if ref not in group.leased_rows:
            put_back_queues.discard(group, ref)
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


def _count(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage, change: int
) -> None:
    if row.kind != FailedKind.ABANDONED:
        group.count_failed(ref[0], ref[1], change)
    state.groups.dirty_groups.add(group.group_id)


def _at_store(row: FailedMessage) -> StoredMessage:
    return StoredMessage(row.store, row.attempt, row.first_failed_at)


def _index_retry(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> None:
    (topic_id, partition, offset), due = ref, row.due
    if row.deaths >= failed_messages.ISOLATED_AFTER:
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
    put_back_queues.count_retries(group, TopicPartition(topic_id, partition), -1)
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
    """Apply: an export has this dead letter since then."""
    row = sweep(state, group.group_id, ref)
    assert row is not None, "the decision has found it"
    change_fields(state, group.group_id, ref, row._replace(exported=at))
    if row.kind == FailedKind.LETTER and not row.exported:
        group.exported_letters += 1
        state.groups.dirty_groups.add(group.group_id)


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
