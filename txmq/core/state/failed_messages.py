"""Failed messages: retrying, parked behind a key fence, at a consumer, dead letters,
abandoned ones.

Table `moved` has a row for each. Its key is the message's place (group, topic,
partition, offset), which stays the same through retry, dead letter and replay. The row
points at the stored batch; nothing is copied. Only this module writes the indexes: a
retrying message is in `retries` and `wakes` while no member holds it, a parked one in
`parked`, one that a consumer's store has in `local`, dead letters and abandoned ones
are in `letters`.

A letter that its plan has put back keeps its row and its indexes until it ends or fails
(`put_back`). What this module returns is the retry that it is.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state import (
    letter_copies,
    letter_edits,
    letter_index,
    local_stores,
    plan_letters,
)
from txmq.core.state.letter_index import Letter, LetterState
from txmq.core.state.local_stores import StoredMessage
from txmq.core.state.plans import LetterOutcome
from txmq.core.state.positions import UNDELIVERED
from txmq.core.state.put_back import PutBackQueue
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State

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


def _stored(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    row: Any = state.failed_messages.get(t.FAILED_KEY.pack(group.group_id, *ref))
    return None if row is None else FailedMessage(*row)


def current(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage
) -> FailedMessage:
    """Return what a row of table `moved` stands for: a letter that its plan has put
    back is a retry. The same row = it is not put back.
    """
    if not (row.plan and _is_put_back(state, ref, row)):
        return row
    lease, plan = group.leased_rows.get(ref), row.plan
    if lease is None:
        return replayed_row(row, kind=FailedKind.RETRY, plan=plan)
    consumer = group.leases[lease].member
    return replayed_row(row, kind=FailedKind.RETRY, plan=plan, attempt=1, consumer=consumer)


def _is_put_back(state: State, ref: MessageRef, row: FailedMessage) -> bool:
    return (
        row.plan > 0
        and row.kind == FailedKind.LETTER
        and not row.token
        and plan_letters.is_put_back(state, row.plan, row.visible_at, ref)
    )


def replayed_row(row: FailedMessage, **changes: Any) -> FailedMessage:  # noqa: ANN401  # fields
    """Return the row of a dead letter that is replayed.

    Attempts and consumer deaths count from zero again; replays go on counting. A plan
    that has ended without it has nothing to do with it any more.
    """
    fields: dict[str, Any] = {"attempt": 0, "deaths": 0, "token": b"", "plan": 0}
    return row._replace(**(fields | changes), replays=row.replays + 1)


def put_back(state: State, group: ConsumerGroup, plan_id: int, refs: Iterable[MessageRef]) -> None:
    """Apply: a plan's cursor has passed these letters."""
    letters: list[Letter] = []
    for ref in refs:
        row = _stored(state, group, ref)
        if row is None or (row.kind, row.plan, row.token) != (FailedKind.LETTER, plan_id, b""):
            continue  # the log has lost what became of it
        letter = letter_of(ref, row)
        assert letter is not None, "it is dead"
        letters.append(letter)
        tp = TopicPartition(ref[0], ref[1])
        group.retrying[tp] += 1
        _queue(group, tp).add(ref[2])
    letter_index.put_back(state.tables, group.group_id, letters)
    group.letters -= len(letters)
    state.groups.dirty_groups.add(group.group_id)


def _queue(group: ConsumerGroup, tp: TopicPartition) -> PutBackQueue:
    queue = group.put_back.get(tp)
    if queue is None:
        queue = group.put_back[tp] = PutBackQueue()
    return queue


def load_queues(state: State) -> None:
    """Make the queues of letters that plans have put back anew from the tables."""
    for plan in state.plans.by_id.values():
        group = state.groups.find(plan.group_id)
        if group is None or not plan.cursor or not plan.count(LetterOutcome.DELIVERED):
            continue
        for key, letter in plan_letters.rows_of(state, plan.plan_id, last=plan.cursor):
            if letter[0] == LetterOutcome.PLANNED:
                ref: Any = t.PLAN_LETTER_KEY.unpack(key)[2:]
                if is_waiting(state, group, ref):
                    _queue(group, TopicPartition(ref[0], ref[1])).add(ref[2])


def is_waiting(state: State, group: ConsumerGroup, ref: MessageRef) -> bool:
    """Return True if a letter is put back, and waits for a consumer."""
    if ref in group.leased_rows:
        return False
    row = _stored(state, group, ref)
    return row is not None and _is_put_back(state, ref, row)


def take_from_queue(state: State, group: ConsumerGroup, ref: MessageRef) -> bool:
    """Apply: a letter that was put back goes to a consumer. Return False if the message
    is no such letter.
    """
    if not group.put_back or not is_waiting(state, group, ref):
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
        plan_letters.ended(state, row.plan, row.visible_at, ref, "abandoned")
    elif not plan_letters.died(state, row.plan, row.visible_at, ref, row.number, row.fingerprint):
        return row
    return row._replace(plan=0)


def set_plan(state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int) -> None:
    """Apply: an open letter belongs to a plan from now on."""
    row = _stored(state, group, ref)
    assert row is not None, "it was planned"
    key = t.FAILED_KEY.pack(group.group_id, *ref)
    state.failed_messages.put(key, tuple(row._replace(plan=plan_id)))


def leave_plan(state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int) -> None:
    """Apply: a message belongs to this plan no more, if it did."""
    stored = _stored(state, group, ref)
    if stored is None or stored.plan != plan_id:
        return
    row = current(state, group, ref, stored)
    if row is stored:
        key = t.FAILED_KEY.pack(group.group_id, *ref)
        state.failed_messages.put(key, tuple(row._replace(plan=0)))
    else:
        drop(state, group, ref)
        put(state, group, ref, row._replace(plan=0))


def drop(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Apply: remove the row and its indexes before another `put`, and return it."""
    stored = _stored(state, group, ref)
    if stored is None:
        return None
    row = current(state, group, ref, stored)
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
    """Apply: remove the row, its indexes, its history and its edits, for good, and tell
    its plan why.
    """
    row = drop(state, group, ref)
    if row is not None and row.plan:
        plan_letters.ended(state, row.plan, row.visible_at, ref, why)
    if row is not None and row.trial_by:
        state.trials.note(group.group_id, ref, row.number, why)
    if row is not None and (row.first_failed_at or row.dead_at):
        state.tables[t.ATTEMPTS].delete(t.FAILED_KEY.pack(group.group_id, *ref))
    if row is not None and row.edits:
        letter_edits.forget(state, (group.group_id, *ref))
    if row is not None and row.copies:
        letter_copies.forget(state, (group.group_id, *ref))
    return row


def remove_processed(
    state: State, group: ConsumerGroup, refs: Iterable[MessageRef]
) -> list[MessageRef]:
    """Apply: remove the rows of leased letters that plans had put back: they are
    processed. Return the other messages, to be removed one by one.
    """
    if group.unfinished_clones:
        return list(refs)
    tables = state.tables
    others: list[MessageRef] = []
    letters: list[Letter] = []
    for ref in refs:
        row = _stored(state, group, ref)
        if row is None or not _is_put_back(state, ref, row):
            others.append(ref)
            continue
        key = t.FAILED_KEY.pack(group.group_id, *ref)
        state.failed_messages.delete(key)
        tables[t.ATTEMPTS].delete(key)
        state.letters.delete(t.LETTER_KEY.pack(group.group_id, row.number))
        plan_letters.processed(state, row.plan, row.visible_at, ref, row.number)
        if row.edits:
            letter_edits.forget(state, (group.group_id, *ref))
        if row.copies:
            letter_copies.forget(state, (group.group_id, *ref))
        letter = letter_of(ref, row)
        assert letter is not None, "it was put back"
        letters.append(letter)
    letter_index.discard_put_back(tables, group.group_id, letters)
    return others


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
    rows: Any = state.failed_messages.range(low, high)
    return [_found(state, group, *item) for item in islice(rows, most)]


def _found(
    state: State,
    group: ConsumerGroup,
    key: bytes,
    row: Any,  # noqa: ANN401  # rows are untyped
) -> tuple[MessageRef, FailedMessage]:
    _group_id, topic_id, partition, offset = t.FAILED_KEY.unpack(key)
    ref = (topic_id, partition, offset)
    return ref, current(state, group, ref, FailedMessage(*row))


def last_rows_before(
    state: State, group: ConsumerGroup, tp: TopicPartition, start: int, end: int, most: int
) -> list[tuple[MessageRef, FailedMessage]]:
    """Return the last failed messages of a partition with start <= offset < end, in
    order, and `most` of them at most.
    """
    low, high = (
        t.FAILED_KEY.pack(group.group_id, *tp, min(offset, t.SIGN)) for offset in (start, end)
    )
    rows: Any = state.failed_messages.range(low, high, reverse=True)
    return [_found(state, group, *item) for item in islice(rows, most)][::-1]


def messages_of_group(
    state: State, group: ConsumerGroup, most: int | None, start: MessageRef = (0, 0, 0)
) -> list[MessageRef]:
    """Return the failed messages of a group in order, from `start` on, and `most` of
    them at most.
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
    """Yield the messages of a partition that are due, longest due first, then those
    that plans have put back.
    """
    start = t.RETRY_KEY.pack(group.group_id, *tp, 0, 0)
    stop = t.RETRY_KEY.pack(group.group_id, *tp, now + 1, 0)
    for key, _row in state.tables[t.RETRIES].range(start, stop):
        ref = (*tp, t.RETRY_KEY.unpack(key)[4])
        row = get(state, group, ref)
        assert row is not None, "the index has it"
        yield ref, row
    for offset in group.put_back.get(tp, ()):
        ref = (*tp, offset)
        row = get(state, group, ref)
        assert row is not None, "the queue has it"
        yield ref, row


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
