"""Failed messages as they are by now: retrying, parked behind a key fence, at a
consumer, dead letters, abandoned ones.

Table `failed` has a row for each (`failed_rows`). A letter that the cursor of its plan
has passed keeps its row for a while: `standing` says what has become of it
(docs/decisions/0093). What `get` and the others return is what a row stands for by now.
"""

from __future__ import annotations

from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.core.state import plan_letters
from txmq.core.state.failed_rows import FailedKind, FailedMessage, abandoned_row, replayed_row
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State
    from txmq.model.topic_partition import TopicPartition

# lost consumers after which a message goes out alone (`core/consumers/poison.py`)
ISOLATED_AFTER = 3
MAX_CLOSED_READ = 1_000  # abandoned letters of a partition, before its first other row


class Standing(Enum):
    """Meanings of a row of table `failed`."""

    STORED = auto()  # what it says
    PUT_BACK = auto()  # a retry, since its plan has passed the letter
    PROCESSED = auto()  # no failed message any more; the row waits to be swept
    ABANDONED = auto()  # likewise, to be changed


def stored(state: State, group_id: int, ref: MessageRef) -> FailedMessage | None:
    """Return the row that table `failed` has of a message."""
    row: Any = state.failed_messages.get(t.FAILED_KEY.pack(group_id, *ref))
    if row is None:
        return None
    return tuple.__new__(FailedMessage, row)  # as fast as it gets: this is done for millions


def standing(state: State, ref: MessageRef, row: FailedMessage) -> Standing:
    """Return what a row of table `failed` stands for."""
    plan = state.plans.by_id.get(row.plan) if row.plan else None
    if plan is None or not plan.cursor:
        return Standing.STORED
    if plan_letters.is_unswept(state, plan, ref):
        return Standing.PROCESSED
    if row.kind != FailedKind.LETTER or row.token:
        return Standing.STORED
    key = plan_letters.key_of(row.plan, row.visible_at, ref)
    if key > plan.cursor:
        return Standing.STORED
    return Standing.ABANDONED if key <= plan.abandoned else Standing.PUT_BACK


def get(state: State, group: ConsumerGroup, ref: MessageRef) -> FailedMessage | None:
    """Return the row of a message if it has failed."""
    row = stored(state, group.group_id, ref)
    if row is None or not row.plan:  # most failed messages are in no plan
        return row
    return seen(state, group, ref, row)


def seen(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage
) -> FailedMessage | None:
    """Return what a row of table `failed` stands for, the same one if nothing else;
    None = the letter is processed.
    """
    now = standing(state, ref, row)
    if now is Standing.STORED:
        return row
    if now is Standing.PROCESSED:
        return None
    if now is Standing.ABANDONED:
        return abandoned_row(row, state.plans.by_id[row.plan].reason)
    lease, plan = group.leased_rows.get(ref), row.plan
    if lease is None:
        return replayed_row(row, kind=FailedKind.RETRY, plan=plan)
    consumer = group.leases[lease].member
    return replayed_row(row, kind=FailedKind.RETRY, plan=plan, attempt=1, consumer=consumer)


def key_of(state: State, group: ConsumerGroup, ref: MessageRef) -> int | None:
    """Return the hash of the key of a leased failed message."""
    letter = group.leased_letters.get(ref)
    if letter is not None:
        return letter.key_hash
    row = get(state, group, ref)
    return None if row is None else row.key_hash


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
    for key, fields in rows:
        _group_id, topic_id, partition, offset = t.FAILED_KEY.unpack(key)
        ref = (topic_id, partition, offset)
        row = seen(state, group, ref, FailedMessage(*fields))
        if row is not None:
            yield ref, row


def first_unprocessed(
    state: State, group: ConsumerGroup, tp: TopicPartition
) -> FailedMessage | None:
    """Return the first failed message of a partition that is not abandoned; None =
    there is none, or `MAX_CLOSED_READ` abandoned ones come before it.
    """
    low, high = (t.FAILED_KEY.pack(group.group_id, *tp, offset) for offset in (0, t.SIGN))
    rows = _found(state, group, islice(state.failed_messages.range(low, high), MAX_CLOSED_READ))
    return next((row for _ref, row in rows if row.kind != FailedKind.ABANDONED), None)


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
    return _refs(state, low, high, most)


def messages_of_topic(
    state: State, group: ConsumerGroup, topic_id: int, most: int
) -> list[MessageRef]:
    """Return the failed messages of a topic, as those of a group."""
    low, high = (
        t.FAILED_KEY.pack(group.group_id, topic_id, 0, 0),
        t.FAILED_KEY.pack(group.group_id, topic_id + 1, 0, 0),
    )
    return _refs(state, low, high, most)


def _refs(state: State, low: bytes, high: bytes, most: int | None) -> list[MessageRef]:
    rows = state.failed_messages.range(low, high)
    return [t.FAILED_KEY.unpack(key)[1:] for key, _row in islice(rows, most)]


def due_rows(
    state: State, group: ConsumerGroup, tp: TopicPartition, now: int
) -> Iterator[tuple[MessageRef, FailedMessage]]:
    """Yield the messages of a partition that are due, longest due first, but for those
    that plans have put back (`put_back_letters`).
    """
    start = t.RETRY_KEY.pack(group.group_id, *tp, 0, 0)
    stop = t.RETRY_KEY.pack(group.group_id, *tp, now + 1, 0)
    for key, _row in state.tables[t.RETRIES].range(start, stop):
        ref = (*tp, t.RETRY_KEY.unpack(key)[4])
        row = get(state, group, ref)
        assert row is not None, "the index has it"
        yield ref, row


def put_back_letters(
    state: State, group: ConsumerGroup, tp: TopicPartition, most: int
) -> Iterator[tuple[MessageRef, FailedMessage, int]]:
    """Yield the letters of a partition that plans have put back, neighbours of a batch
    together: the first one with its row, and their number.

    Retention may have copied them since, each to a batch of its own. The queue knows
    their former batch, which is there as long as a row points at it.
    """
    queue = group.put_back.get(tp)
    for start, count, position in () if queue is None else queue.neighbours(most):
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
