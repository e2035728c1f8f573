"""Failed messages: retrying, parked behind a key fence, at a consumer, dead letters,
abandoned ones.

Table `failed` has a row for each (`failed_rows`). Only this module and `passed_letters`
write rows and indexes: a retrying message is in `retries` and `retries_by_time` while
no member holds it, a parked one in `parked`, one that a consumer's store has in
`local`, dead letters and abandoned ones are in `letters`.

A letter that the cursor of its plan has passed keeps its row and its indexes for a
while. What this module returns is what the row stands for by now (`passed_letters`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.core.state import (
    letter_copies,
    letter_edits,
    letter_index,
    local_stores,
    passed_letters,
    plan_letters,
    put_back_queues,
)
from txmq.core.state.failed_rows import (
    CLOSED,
    DELIVERABLE,
    PLAN,
    FailedKind,
    FailedMessage,
    letter_of,
)
from txmq.core.state.local_stores import StoredMessage
from txmq.core.state.positions import UNDELIVERED
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State

# lost consumers after which a message goes out alone (`core/consumers/poison.py`)
ISOLATED_AFTER = 3
PROCESSED = ""  # why a message is no failed message any more; otherwise a reason


def get(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Return the row of a message if it has failed."""
    return passed_letters.find(state, group, ref)


def planned(
    state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int
) -> FailedMessage | None:
    """Return the row of a message that this plan has not come to yet."""
    row = passed_letters.table_row(state, group.group_id, ref)
    if row is None or row.plan == plan_id:
        return row  # neither put back nor processed since
    return get(state, group, ref)


def before_failure(state: State, group: ConsumerGroup, ref: MessageRef) -> None:
    """Apply: a message fails now. What is left of a letter that was processed in an
    earlier life goes first.
    """
    passed_letters.swept_row(state, group, ref)


def key_of(state: State, group: ConsumerGroup, ref: MessageRef) -> int | None:
    """Return the hash of the key of a leased failed message."""
    letter = group.leased_letters.get(ref)
    if letter is not None:
        return letter.key_hash
    row = get(state, group, ref)
    return None if row is None else row.key_hash


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
    change_fields(state, (group.group_id, *ref), row._replace(**changes))


def change_fields(state: State, at: tuple[int, int, int, int], row: FailedMessage) -> None:
    """Apply: give a message a row of which only fields have changed that no index has.
    `at` is the group's id with the message's place.
    """
    state.failed_messages.put(t.FAILED_KEY.pack(*at), tuple(row))


def leave_plan(state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int) -> None:
    """Apply: a message belongs to this plan no more, if it did."""
    stored = passed_letters.failed_row(state, group.group_id, ref)
    if stored is None or stored.plan != plan_id:
        return
    row = passed_letters.current(state, group, ref, stored)
    if row is stored:
        _rewrite(state, group, ref, row, plan=0)
    else:
        drop(state, group, ref)
        put(state, group, ref, row._replace(plan=0))


def drop(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Apply: remove the row and its indexes before another `put`, and return it."""
    group.leased_letters.pop(ref, None)
    stored = passed_letters.swept_row(state, group, ref)
    if stored is None:
        return None
    row = passed_letters.current(state, group, ref, stored) if stored.plan else stored
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
            put_back_queues.discard(group, ref)
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
    """Apply: an export has this dead letter since then; no index knows of it."""
    row = passed_letters.swept_row(state, group, ref)
    assert row is not None, "the decision has found it"
    _rewrite(state, group, ref, row, exported=at)
    if row.kind == FailedKind.LETTER and not row.exported:
        group.exported_letters += 1
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
        if not passed_letters.is_over(state, ref, stored):
            yield ref, passed_letters.current(state, group, ref, stored)


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
