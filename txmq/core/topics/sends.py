"""Plain sends: one batch for one partition, published at once unless it is delayed, or
one of its keys is held.

Those that came in one frame and have nothing to wait for are one record. Each is judged
as if those before it had been stored already, and what is refused, or was known, is
left out of the record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import key_hashes
from txmq.batch.header import DELIVER_AT
from txmq.core.events.base import BatchesStored, BatchQueued, BatchStored
from txmq.core.events.delays import BatchDelayed
from txmq.core.state.state import Outcome, Producer, Rejected, SendReceipt, State
from txmq.core.topics import delay_rules, key_order
from txmq.core.topics.admission import admitted
from txmq.errors import SequenceGap, UnknownProducer
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.batch import BatchHeader
    from txmq.core.events.base import Place
    from txmq.core.state.state import Topic


class Send(NamedTuple):
    """Store a batch in a partition. `batch` has been verified; `header` is its own."""

    topic: str
    epoch: int  # shape of the topic that the sender knows, 0 = it does not say
    partition: int
    batch: bytes
    header: BatchHeader


class SendTogether(NamedTuple):
    """Store these batches, each of which `shares`. The reply is a list, in their
    order.
    """

    sends: tuple[Send, ...]


def shares(state: State, topic: Topic | None, send: Send) -> bool:
    """Whether a batch for that topic may be stored with others: it is not delayed, and
    no key of its partition held.
    """
    return not send.header.columns & DELIVER_AT and not (
        topic and state.holds[topic.topic_id, send.partition]
    )


def decide_send(state: State, command: Send, now: int) -> Outcome | Rejected:
    header = command.header
    # First of all: a send that is repeated after its topic has grown must get its
    # receipt, not a reason to send anew.
    known = _seen_before(state.producers.get(header.producer_id), header)
    if known is not None:
        return known
    topic = admitted(state, command.topic, command.partition, command.epoch, header, command.batch)
    if isinstance(topic, Rejected):
        return topic
    topic_id, partition, batch = topic.topic_id, command.partition, command.batch
    if header.columns & DELIVER_AT and delay_rules.is_delayed(batch, header, now):
        made = delay_rules.delay(topic, partition, batch, header, now)
        return (
            made
            if isinstance(made, Rejected)
            else Outcome((made[0],), SendReceipt(-1, now), made[1])
        )
    size = (header.count, len(batch), header.tag_filter)
    if state.holds[topic_id, partition]:
        hashes = distinct(key_hashes(batch))
        if key_order.any_held(state, topic_id, partition, hashes):
            queued = BatchQueued(
                topic_id,
                partition,
                *size,
                header.producer_id,
                header.epoch,
                header.sequence,
                hashes,
            )
            return Outcome((queued,), SendReceipt(-1, now), batch)
    base = topic.ends[partition]
    return Outcome((_stored(topic_id, partition, base, header),), SendReceipt(base, now), batch)


def decide_together(state: State, command: SendTogether, now: int) -> Outcome:
    made = _Made(state, now)
    replies = [made.stored(send) for send in command.sends]
    events: tuple[Any, ...] = tuple(made.events)
    if len(events) > 1:
        events = (BatchesStored(events),)
    return Outcome(events, replies, b"".join(made.attachments))


class _Made:
    """The batches so far, each on the state that those before it leave behind."""

    def __init__(self, state: State, now: int) -> None:
        self._state, self._now = state, now
        self._producers: dict[bytes, Producer] = {}  # as they will be
        self._ends: dict[tuple[int, int], int] = {}
        self.events: list[BatchStored] = []
        self.attachments: list[bytes] = []

    def stored(self, send: Send) -> object:
        """The reply; what is stored is noted."""
        name, epoch, partition, batch, header = send
        known = _seen_before(self._producer(header.producer_id), header)
        if known is not None:
            return known if isinstance(known, Rejected) else known.reply
        topic = admitted(self._state, name, partition, epoch, header, batch)
        if isinstance(topic, Rejected):
            return topic
        spot = topic.topic_id, partition
        base = self._ends.get(spot)
        if base is None:
            base = topic.ends[partition]
        event = _stored(*spot, base, header)
        self._ends[spot] = base + event.count
        _remember(self._producers, event, base, self._now)
        self.events.append(event)
        self.attachments.append(batch)
        return SendReceipt(base, self._now)

    def _producer(self, producer_id: bytes) -> Producer | None:
        mine = self._producers.get(producer_id)
        if mine is None and (known := self._state.producers.get(producer_id)) is not None:
            mine = self._producers[producer_id] = replace(known, receipts=known.receipts.copy())
        return mine


def _stored(topic_id: int, partition: int, base: int, header: BatchHeader) -> BatchStored:
    _checksum, _codec, _columns, count, length, _size, _born_at, tags, producer, epoch, sequence = (
        header
    )
    return BatchStored(topic_id, partition, base, count, length, tags, producer, epoch, sequence)


def is_known(state: State, header: BatchHeader) -> bool:
    """Whether the batch is a send repeated, whose receipt is still kept."""
    return isinstance(_seen_before(state.producers.get(header.producer_id), header), Outcome)


def distinct(hashes: list[int | None]) -> tuple[int, ...]:
    """The key hashes of a batch, each once, in the order of their first rows; rows
    without a key have none.
    """
    return tuple(dict.fromkeys(h for h in hashes if h is not None))


def _seen_before(producer: Producer | None, header: BatchHeader) -> Outcome | Rejected | None:
    """The answer to a repeated or misplaced sequence; None = it is the next one."""
    if producer is None or header.epoch > producer.epoch:
        return None if header.sequence == 0 else _forgotten(header)
    if header.epoch < producer.epoch:
        return Rejected(UnknownProducer, "a newer incarnation of this producer has taken over")
    if header.sequence == producer.last + 1:
        return None
    if header.sequence > producer.last:
        missing = f"sequence {header.sequence} after {producer.last}"
        return Rejected(
            SequenceGap,
            f"a send is missing: {missing}",
            "send again from the first unacknowledged one",
        )
    for sequence, offset, stored_at in producer.receipts:
        if sequence == header.sequence:
            return Outcome(reply=SendReceipt(offset, stored_at, duplicate=True))
    return _forgotten(header)


def _forgotten(header: BatchHeader) -> Rejected:
    message = (
        f"no receipt is kept of sequence {header.sequence} of producer {header.producer_id.hex()}"
    )
    return Rejected(
        UnknownProducer,
        message,
        "it may have been stored: look for the message id before sending again",
    )


def _remember(
    producers: dict[bytes, Producer],
    event: BatchStored | BatchQueued | BatchDelayed,
    offset: int,
    stored_at: int,
) -> None:
    producer = producers.get(event.producer)
    if producer is None or event.epoch > producer.epoch:
        producer = producers[event.producer] = Producer(event.epoch, -1, stored_at)
    producer.last = event.sequence + event.count - 1
    producer.seen_at = stored_at
    producer.receipts.append((event.sequence, offset, stored_at))


def _sent(
    state: State, event: BatchStored | BatchQueued | BatchDelayed, offset: int, stored_at: int
) -> None:
    """The producer's side of it."""
    _remember(state.producers, event, offset, stored_at)
    state.dirty_producers.add(event.producer)


def apply_stored(state: State, event: BatchStored, place: Place) -> None:
    _publish(state, event, place.attachment, place)


def _publish(state: State, event: BatchStored, position: int, place: Place) -> None:
    topic = state.topics_by_id[event.topic_id]
    topic.ends[event.partition] = event.base_offset + event.count
    topic.sizes[event.partition] += event.length
    topic.stored += event.length
    state.dirty_topics.add(event.topic_id)
    state.published.add(event.topic_id)
    state.entries.put(
        t.ENTRY_KEY.pack(event.topic_id, event.partition, event.base_offset),
        t.Entry(position, event.length, event.count, place.stored_at, event.tag_filter, place.end),
    )
    _sent(state, event, event.base_offset, place.stored_at)


def batches(event: BatchesStored, place: Place) -> Iterator[tuple[BatchStored, int]]:
    """What is in a record of several, each with the position of its own batch."""
    position = place.attachment
    for fields in event.batches:
        one = fields if type(fields) is BatchStored else BatchStored(*fields)
        yield one, position
        position += one.length


def apply_together(state: State, event: BatchesStored, place: Place) -> None:
    for one, position in batches(event, place):
        _publish(state, one, position, place)


def apply_queued(state: State, event: BatchQueued, place: Place) -> None:
    batch = key_order.HeldBatch(
        event.topic_id,
        event.partition,
        place.attachment,
        event.length,
        event.count,
        event.tag_filter,
        event.hashes,
    )
    state.tables[t.QUEUED].put(t.TICKET_KEY.pack(place.position), batch)
    key_order.take(state, place.position, None, (batch,))
    _sent(state, event, -1, place.stored_at)


def apply_delayed(state: State, event: BatchDelayed, place: Place) -> None:
    delay_rules.apply_delayed(state, event, place)
    _sent(state, event, -1, place.stored_at)


DECIDERS: dict[type, Any] = {Send: decide_send, SendTogether: decide_together}
APPLIERS: dict[type, Any] = {
    BatchStored: apply_stored,
    BatchesStored: apply_together,
    BatchQueued: apply_queued,
    BatchDelayed: apply_delayed,
}
