"""The rules of delayed messages: they take their place in the topic, and in the order
of their key, when they are due.

A message that is due is published by reference: an entry points at where it was stored.
If its key is held then, it takes a ticket like a plain send would. Those of one key
come in the order of their times, and of one time in the order in which they were
stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import deliveries, split
from txmq.core.events.delays import (
    BatchDelayed,
    DelayedMoved,
    DelayedPublished,
    DelayedQueued,
    DelayedRecalled,
    DelayedRow,
    RecallsForgotten,
)
from txmq.core.state import visibility
from txmq.core.state.state import Outcome, Rejected, State
from txmq.core.topics import delayed, key_order
from txmq.core.topics.delayed import Delayed
from txmq.errors import BadRequest, MessageTooLarge, RecallTooLate
from txmq.model import limits
from txmq.model.message import at_time, message_id
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.batch import BatchHeader
    from txmq.core.events.base import Place
    from txmq.core.state.state import Topic
    from txmq.core.topics.delayed import Id, Waiting

AT_ONCE = 256  # messages that one record publishes: 2 ms
RECALLS_AT_ONCE = 1_000
RECALLS_KEPT = 7 * 24 * 3600 * 1_000_000  # as long as the outcomes of transactions


class PublishDue(NamedTuple):
    """Timer: publish what is due. The reply says whether there is more of it."""


class Recall(NamedTuple):
    """Take messages back: all of them, or none where it is too late for one."""

    ids: tuple[Id, ...]


class RecallReply(NamedTuple):
    """How many were taken back; the others had been already."""

    recalled: int


class MoveDelayed(NamedTuple):
    """Store messages again that outlive their segment: what waits, and its batch."""

    messages: tuple[tuple[Waiting, bytes], ...]


class ForgetRecalls(NamedTuple):
    """Timer: forget the recalls that are old. The reply says whether there are more."""


def is_delayed(batch: bytes, header: BatchHeader, now: int) -> bool:
    """Whether something in the batch is yet to be waited for."""
    return any(at_time(carried, now) > now for carried in deliveries(batch, header))


def delay(
    topic: Topic, partition: int, batch: bytes, header: BatchHeader, now: int
) -> tuple[BatchDelayed, bytes] | Rejected:
    """The event that stores a delayed batch, and its attachment. What is not delayed in
    it is due at once.
    """
    if header.count > limits.DELAYED_ROWS:
        hint = f"send at most {limits.DELAYED_ROWS} in a batch"
        return Rejected(
            MessageTooLarge, f"a batch of {header.count} messages with times of delivery", hint
        )
    rows, start = [], 0
    singles = split(batch, header)
    for single in singles:
        due = max(now, at_time(single.deliver_at, now))
        rows.append(DelayedRow(start, len(single.data), due, single.tag_bits, single.key_hash))
        start += len(single.data)
    ids = (header.producer_id, header.epoch, header.sequence)
    event = BatchDelayed(topic.topic_id, partition, header.count, *ids, tuple(rows))
    return event, b"".join(single.data for single in singles)


def decide_due(state: State, command: PublishDue, now: int) -> Outcome:
    """A message of a group that is still being published must not be seen before the
    rest.
    """
    del command
    ends: dict[tuple[int, int], int] = {}
    published: list[tuple[int, int, int]] = []
    queued: list[DelayedQueued] = []
    unfinished, looked = visibility.publisher(state), 0
    for looked, (due, position, message) in enumerate(delayed.rows(state, stop=now + 1), 1):
        topic, spot = state.topics_by_id[message.topic_id], (message.topic_id, message.partition)
        if looked > AT_ONCE:
            break
        if topic.deleted:
            published.append((due, position, -1))
        elif _meets_a_hold(state, message):
            queued.append(DelayedQueued(due, position))
        elif message.origin != unfinished:
            base = ends.get(spot, topic.ends[message.partition])
            published.append((due, position, base))
            ends[spot] = base + 1
    events = (*((DelayedPublished(tuple(published)),) if published else ()), *queued)
    return Outcome(events, looked > AT_ONCE and bool(events))


def _meets_a_hold(state: State, message: Delayed) -> bool:
    spot, key = (message.topic_id, message.partition), message.key_hash
    return key is not None and bool(state.holds[spot]) and key_order.any_held(state, *spot, (key,))


def decide_recall(state: State, command: Recall, now: int) -> Outcome | Rejected:
    del now
    if len(command.ids) > RECALLS_AT_ONCE:
        return Rejected(
            BadRequest, f"{len(command.ids)} messages in one call", f"at most {RECALLS_AT_ONCE}"
        )
    ids = [found for found in dict.fromkeys(command.ids) if not delayed.was_recalled(state, found)]
    late = [message_id(*found) for found in ids if delayed.find(state, found) is None]
    if late:
        message = f"message {late[0]} does not wait for its time" + (
            f", nor do {len(late) - 1} others" * (len(late) > 1)
        )
        hint = "it was published, or never was here: txmq message show"
        return Rejected(RecallTooLate, message, hint, {"late": late})
    return Outcome((DelayedRecalled(tuple(ids)),) if ids else (), RecallReply(len(ids)))


def decide_move(state: State, command: MoveDelayed, now: int) -> Outcome:
    """What was published, recalled or moved meanwhile is left out."""
    del now
    there = [(waiting, data) for waiting, data in command.messages if delayed.still(state, waiting)]
    event = DelayedMoved(
        tuple((waiting.due, waiting.position, len(data)) for waiting, data in there)
    )
    return Outcome((event,) if there else (), None, b"".join(data for _waiting, data in there))


def decide_forget(state: State, command: ForgetRecalls, now: int) -> Outcome:
    del command
    old: list[tuple[int, bytes, int]] = []
    for recall in delayed.recalls_before(state, now - RECALLS_KEPT):
        if len(old) == AT_ONCE:
            break
        old.append(recall)
    return Outcome((RecallsForgotten(tuple(old)),) if old else (), len(old) == AT_ONCE)


def apply_delayed(state: State, event: BatchDelayed, place: Place) -> None:
    for number, (start, length, due, tag_filter, key_hash) in enumerate(event.rows, event.sequence):
        message = Delayed(
            event.topic_id, event.partition, length, tag_filter, key_hash, event.producer, number
        )
        delayed.put(state, due, place.attachment + start, message)


def apply_published(state: State, event: DelayedPublished, place: Place) -> None:
    for due, position, offset in event.messages:
        message = delayed.take(state, due, position)
        if offset >= 0:
            state.topics_by_id[message.topic_id].ends[message.partition] = offset + 1
            state.dirty_topics.add(message.topic_id)
            key_order.point_at(state, _held(position, message), offset, place)


def apply_moved(state: State, event: DelayedMoved, place: Place) -> None:
    to = place.attachment
    for due, position, length in event.messages:
        delayed.move(state, due, position, to)
        to += length


def apply_queued(state: State, event: DelayedQueued, place: Place) -> None:
    batch = _held(event.position, delayed.take(state, event.due, event.position))
    state.tables[t.QUEUED].put(t.TICKET_KEY.pack(place.position), batch)
    key_order.take(state, place.position, None, (batch,))


def _held(position: int, message: Delayed) -> key_order.HeldBatch:
    hashes = () if message.key_hash is None else (message.key_hash,)
    spot = (message.topic_id, message.partition)
    return key_order.HeldBatch(
        *spot, message.moved_to or position, message.length, 1, message.tag_filter, hashes
    )


def apply_recalled(state: State, event: DelayedRecalled, place: Place) -> None:
    for origin, sequence in event.ids:
        delayed.recall(state, (origin, sequence), place.stored_at)


def apply_forgotten(state: State, event: RecallsForgotten, place: Place) -> None:
    del place
    for at, origin, sequence in event.recalls:
        delayed.forget(state, at, (origin, sequence))


DECIDERS: dict[type, Any] = {
    PublishDue: decide_due,
    Recall: decide_recall,
    MoveDelayed: decide_move,
    ForgetRecalls: decide_forget,
}
APPLIERS: dict[type, Any] = {
    DelayedPublished: apply_published,
    DelayedMoved: apply_moved,
    DelayedQueued: apply_queued,
    DelayedRecalled: apply_recalled,
    RecallsForgotten: apply_forgotten,
}
