"""Rules of delayed messages: they get their offset, and their place in the order of
their key, when they are due.

A due message is published by reference: an index entry points at its position in the
log. If its key is held, it takes a ticket as a plain send does. Messages of one key
come in the order of their times, those of one time in the order of storing.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.batch import delivery_times, split
from txmq.core.events.delays import (
    BatchDelayed,
    DelayedMoved,
    DelayedPublished,
    DelayedQueued,
    DelayedRecalled,
    DelayedRow,
    RecallsForgotten,
)
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import visibility
from txmq.core.state.state import State
from txmq.core.topics import delayed, key_order, lost_batches, producer_owners
from txmq.core.topics.delayed import DelayedMessage
from txmq.errors import BadRequest, MessageTooLarge, RecallTooLate
from txmq.model import limits
from txmq.model.message import duration_of, message_id, resolve_time
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import DAY
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.batch import BatchHeader
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import Topic
    from txmq.core.topics.delayed import DelayedId, ScheduledMessage

STEP_MESSAGES = 256  # published by one record: 2 ms
MAX_RECALLS = 1_000
RECALL_RETENTION = 7 * DAY  # as for outcomes of transactions


class PublishDue(NamedTuple):
    """Timer: publish due messages. The reply is True if there are more."""


class Recall(NamedTuple):
    """Recall messages: all of them, or none if it is too late for one."""

    ids: tuple[DelayedId, ...]
    user: str = ""  # who recalls; "" = the broker has no users


class RecallReply(NamedTuple):
    """The number of messages that were recalled now; the others had been before."""

    recalled: int


class RelocateDelayed(NamedTuple):
    """Copy messages whose segment has to go: each with its batch."""

    messages: tuple[tuple[ScheduledMessage, bytes], ...]


class ForgetRecalls(NamedTuple):
    """Timer: forget expired recalls. The reply is True if there are more."""


def is_delayed(batch: bytes, header: BatchHeader, now: int) -> bool:
    """Return whether a message of the batch is due later than now."""
    return any(resolve_time(carried, now) > now for carried in delivery_times(batch, header))


def delayed_batch(
    topic: Topic, partition: int, batch: bytes, header: BatchHeader, now: int
) -> tuple[BatchDelayed, bytes]:
    """Return the event that stores a delayed batch, and its attachment.

    Messages of the batch without a delay are due at once.
    """
    if header.count > limits.DELAYED_ROWS:
        raise MessageTooLarge(
            f"batch of {header.count} delayed messages",
            hint=f"send at most {limits.DELAYED_ROWS} in a batch",
        )
    rows, start = [], 0
    singles = split(batch, header)
    for single in singles:
        due = max(now, resolve_time(single.deliver_at, now))
        duration = duration_of(single.deliver_at)
        length = len(single.data)
        rows.append(DelayedRow(start, length, due, single.tag_bits, single.key_hash, duration))
        start += len(single.data)
    ids = (header.producer_id, header.epoch, header.sequence)
    event = BatchDelayed(topic.topic_id, partition, header.count, *ids, tuple(rows))
    return event, b"".join(single.data for single in singles)


def decide_due(state: State, _command: PublishDue, now: int) -> Outcome:
    ends: dict[TopicPartition, int] = {}
    published: list[tuple[int, int, int]] = []
    queued: list[DelayedQueued] = []
    # A message of a bundle in publication must not be visible before the rest of it.
    unfinished, scanned = visibility.publishing_token(state), 0
    for scanned, (due, position, message) in enumerate(delayed.scan(state, stop=now + 1), 1):
        topic = state.topics_by_id[message.topic_id]
        tp = TopicPartition(message.topic_id, message.partition)
        if scanned > STEP_MESSAGES:
            break
        if topic.deleted:
            published.append((due, position, -1))
        elif _meets_held_key(state, message):
            queued.append(DelayedQueued(due, position))
        elif message.producer != unfinished:
            base = ends.get(tp, topic.end_offsets[message.partition])
            published.append((due, position, base))
            ends[tp] = base + 1
    events = (*((DelayedPublished(tuple(published)),) if published else ()), *queued)
    return Outcome(events, scanned > STEP_MESSAGES and bool(events))


def _meets_held_key(state: State, message: DelayedMessage) -> bool:
    key = message.key_hash
    if key is None or not state.held_keys:
        return False
    tp = TopicPartition(message.topic_id, message.partition)
    return bool(state.held_keys[tp]) and key_order.any_held(state, *tp, (key,))


def decide_recall(state: State, command: Recall, _now: int) -> Outcome:
    if len(command.ids) > MAX_RECALLS:
        raise BadRequest(
            f"recall of {len(command.ids)} messages", hint=f"recall at most {MAX_RECALLS} in a call"
        )
    for producer in {producer for producer, _sequence in command.ids}:
        producer_owners.check_owner(state, producer, command.user)
    ids = [one for one in dict.fromkeys(command.ids) if not delayed.was_recalled(state, one)]
    late = [message_id(*one) for one in ids if delayed.find(state, one) is None]
    if late:
        others = f"; nor are {len(late) - 1} others" if len(late) > 1 else ""
        raise RecallTooLate(
            f"message {late[0]} is not waiting to be due{others}",
            hint="it was published, or never stored here: txmq message show",
            detail={"late": late},
        )
    return Outcome((DelayedRecalled(tuple(ids)),) if ids else (), RecallReply(len(ids)))


def decide_relocate(state: State, command: RelocateDelayed, _now: int) -> Outcome:
    """Copy the messages that were not published, recalled or copied meanwhile."""
    waiting = [(one, data) for one, data in command.messages if delayed.is_unchanged(state, one)]
    event = DelayedMoved(tuple((one.due, one.position, len(data)) for one, data in waiting))
    return Outcome((event,) if waiting else (), None, b"".join(data for _, data in waiting))


def decide_forget(state: State, _command: ForgetRecalls, now: int) -> Outcome:
    before = state.certain(now) - RECALL_RETENTION
    old = list(islice(delayed.recalls_before(state, before), STEP_MESSAGES))
    return Outcome((RecallsForgotten(tuple(old)),) if old else (), len(old) == STEP_MESSAGES)


def apply_delayed(state: State, event: BatchDelayed, context: RecordContext) -> None:
    for number, row in enumerate(event.rows, event.sequence):
        start, length, due, tag_filter, key_hash, duration = DelayedRow(*row)
        message = DelayedMessage(
            *(event.topic_id, event.partition, length, tag_filter, key_hash),
            *(event.producer, number),
            duration=duration,
        )
        delayed.put(state, due, context.attachment_position + start, message)


def apply_published(state: State, event: DelayedPublished, context: RecordContext) -> None:
    for due, position, offset in event.messages:
        message = delayed.remove(state, due, position)
        if offset >= 0:
            topic = state.topics_by_id[message.topic_id]
            lost_batches.move_end(state, topic, message.partition, offset, 1, context)
            state.dirty_topics.add(message.topic_id)
            key_order.publish_batch(state, _unplaced_batch(position, message), offset, context)


def apply_moved(state: State, event: DelayedMoved, context: RecordContext) -> None:
    to = context.attachment_position
    for due, position, length in event.messages:
        delayed.set_position(state, due, position, to)
        to += length


def apply_queued(state: State, event: DelayedQueued, context: RecordContext) -> None:
    batch = _unplaced_batch(event.position, delayed.remove(state, event.due, event.position))
    state.tables[t.QUEUED].put(t.TICKET_KEY.pack(context.position), batch)
    key_order.hold_keys(state, context.position, None, (batch,))


def _unplaced_batch(position: int, message: DelayedMessage) -> key_order.UnplacedBatch:
    hashes = () if message.key_hash is None else (message.key_hash,)
    return key_order.UnplacedBatch(
        message.topic_id,
        message.partition,
        message.moved_to or position,
        message.length,
        1,
        message.tag_filter,
        hashes,
    )


def apply_recalled(state: State, event: DelayedRecalled, context: RecordContext) -> None:
    for producer, sequence in event.ids:
        delayed.recall(state, (producer, sequence), context.stored_at)


def apply_forgotten(state: State, event: RecallsForgotten, _context: RecordContext) -> None:
    for at, producer, sequence in event.recalls:
        delayed.forget_recall(state, at, (producer, sequence))


DECIDERS: Deciders = {
    PublishDue: decide_due,
    Recall: decide_recall,
    RelocateDelayed: decide_relocate,
    ForgetRecalls: decide_forget,
}
APPLIERS: Appliers = {
    DelayedPublished: apply_published,
    DelayedMoved: apply_moved,
    DelayedQueued: apply_queued,
    DelayedRecalled: apply_recalled,
    RecallsForgotten: apply_forgotten,
}
