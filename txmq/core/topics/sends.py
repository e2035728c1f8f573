"""Rules of plain sends: one batch for one partition, published at once unless it is
delayed or a ticket holds one of its keys.

Batches of one request that need not wait share a record. Each is judged as if those
before it were stored already. Rejected and repeated ones are left out of the record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import key_hashes
from txmq.batch.header import DELIVER_AT
from txmq.core.events.delays import BatchDelayed
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.topics import BatchesStored, BatchQueued, BatchStored, SequencesSkipped
from txmq.core.state.state import ProducerState, State
from txmq.core.topics import delay_rules, key_order, lost_batches, producer_owners
from txmq.core.topics.topics import find_writable
from txmq.errors import RequestRejected, SequenceGap, StaleTopic, UnknownProducer
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t
from txmq.wire.data_requests import SendReceipt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.batch import BatchHeader
    from txmq.core.events.base import RecordContext
    from txmq.core.events.users import ProducerOwned
    from txmq.core.state.state import Topic


class StoreBatch(NamedTuple):
    """Store a batch in a partition. The batch has been verified; `header` is its
    own.
    """

    topic: str
    epoch: int  # shape of the topic that the sender knows; 0 = unknown
    partition: int
    batch: bytes
    header: BatchHeader
    user: str = ""  # whose session sends; "" = the broker has no users


class StoreBatches(NamedTuple):
    """Store batches that `can_share_record`. The reply is a list in their order."""

    sends: tuple[StoreBatch, ...]


class SkipSequences(NamedTuple):
    """Have a producer's session go on at `sequence`: nothing before it will come."""

    producer: bytes
    epoch: int
    sequence: int
    user: str = ""  # as of a batch


def can_share_record(state: State, topic: Topic | None, send: StoreBatch) -> bool:
    """Return whether a batch may share a record with others: it is not delayed, and no
    key of its partition is held.
    """
    return not send.header.columns & DELIVER_AT and not (
        topic
        and state.held_keys
        and state.held_keys[TopicPartition(topic.topic_id, send.partition)]
    )


def decide_store_batch(state: State, command: StoreBatch, now: int) -> Outcome:
    header = command.header
    # The sequence comes first: a send repeated after its topic has grown must get its
    # receipt, not a rejection that makes the producer send it anew.
    user = command.user  # "" may act for every owner, and owns nothing
    if user:
        producer_owners.check_owner(state, header.producer_id, user)
    repeated = _check_sequence(state.producers.get(header.producer_id), header)
    if repeated is not None:
        return repeated
    topic = find_writable(
        state, command.topic, command.partition, command.epoch, header, command.batch
    )
    topic_id, partition, batch = topic.topic_id, command.partition, command.batch
    claims = producer_owners.claim(state, header.producer_id, user) if user else ()
    if header.columns & DELIVER_AT and delay_rules.is_delayed(batch, header, now):
        event, attachment = delay_rules.delayed_batch(topic, partition, batch, header, now)
        return Outcome((event, *claims), SendReceipt(-1, now), attachment)
    if state.held_keys and state.held_keys[TopicPartition(topic_id, partition)]:
        hashes = distinct_hashes(key_hashes(batch))
        if key_order.any_held(state, topic_id, partition, hashes):
            queued = BatchQueued(
                topic_id,
                partition,
                header.count,
                len(batch),
                header.tag_filter,
                header.producer_id,
                header.epoch,
                header.sequence,
                hashes,
            )
            return Outcome((queued, *claims), SendReceipt(-1, now), batch)
    base = topic.end_offsets[partition]
    stored = _stored_event(topic_id, partition, base, header)
    return Outcome((stored, *claims), SendReceipt(base, now), batch)


def decide_store_batches(state: State, command: StoreBatches, now: int) -> Outcome:
    record = _SharedRecord(state, now)
    replies = [_reply_to(record, send) for send in command.sends]
    events: tuple[Any, ...] = tuple(record.events)
    if len(events) > 1:
        events = (BatchesStored(events),)
    return Outcome((*events, *record.claims), replies, b"".join(record.attachments))


def _reply_to(record: _SharedRecord, send: StoreBatch) -> object:
    try:
        return record.add(send)
    except RequestRejected as refused:
        return refused


class _SharedRecord:
    """The batches of a record, each judged on the state that those before it leave."""

    def __init__(self, state: State, now: int) -> None:
        self._state, self._now = state, now
        self._producers: dict[bytes, ProducerState] = {}  # after the batches so far
        self._ends: dict[TopicPartition, int] = {}
        self.claims: dict[ProducerOwned, None] = {}
        self.events: list[BatchStored] = []
        self.attachments: list[bytes] = []

    def add(self, send: StoreBatch) -> object:
        """Add a batch to the record if it is to be stored, and return the reply."""
        name, epoch, partition, batch, header, user = send
        if user:
            producer_owners.check_owner(self._state, header.producer_id, user)
        repeated = _check_sequence(self._producer(header.producer_id), header)
        if repeated is not None:
            return repeated.reply
        topic = find_writable(self._state, name, partition, epoch, header, batch)
        tp = TopicPartition(topic.topic_id, partition)
        base = self._ends.get(tp)
        if base is None:
            base = topic.end_offsets[partition]
        event = _stored_event(*tp, base, header)
        self._ends[tp] = base + event.count
        _add_receipt(self._producers, event, base, self._now)
        if user:
            claims = producer_owners.claim(self._state, header.producer_id, user)
            self.claims |= dict.fromkeys(claims)
        self.events.append(event)
        self.attachments.append(batch)
        return SendReceipt(base, self._now)

    def _producer(self, producer_id: bytes) -> ProducerState | None:
        producer = self._producers.get(producer_id)
        if producer is None and (before := self._state.producers.get(producer_id)) is not None:
            producer = replace(before, receipts=before.receipts.copy())
            self._producers[producer_id] = producer
        return producer


def decide_skip(state: State, command: SkipSequences, _now: int) -> Outcome:
    producer_owners.check_owner(state, command.producer, command.user)
    producer, last = state.producers.get(command.producer), command.sequence - 1
    if producer is None or command.epoch > producer.epoch:
        skips = last >= 0
    else:
        skips = command.epoch == producer.epoch and last > producer.last
    if not skips:
        return Outcome()
    claims = producer_owners.claim(state, command.producer, command.user)
    return Outcome((SequencesSkipped(*command[:2], last), *claims))


def _stored_event(topic_id: int, partition: int, base: int, header: BatchHeader) -> BatchStored:
    _checksum, _codec, _columns, count, length, _size, _born_at, tags, producer, epoch, sequence = (
        header
    )
    return BatchStored(topic_id, partition, base, count, length, tags, producer, epoch, sequence)


def is_repeated(state: State, header: BatchHeader) -> bool:
    """Return whether the batch is a repeated send with a receipt."""
    producer = state.producers.get(header.producer_id)
    if producer is None or header.sequence > producer.last:  # as most are
        return False
    try:
        return _check_sequence(producer, header) is not None
    except RequestRejected:
        return False


def distinct_hashes(hashes: list[int | None]) -> tuple[int, ...]:
    """Return the key hashes of a batch, each once, in the order of their first rows."""
    return tuple(dict.fromkeys(h for h in hashes if h is not None))


def _check_sequence(producer: ProducerState | None, header: BatchHeader) -> Outcome | None:
    """Return the reply to a repeated or unexpected sequence; None = it is the next."""
    if producer is None or header.epoch > producer.epoch:
        if header.sequence:
            raise _receipt_forgotten(header)
        return None
    if header.epoch < producer.epoch:
        raise UnknownProducer(
            f"producer epoch {header.epoch} is fenced: epoch {producer.epoch} has taken over",
            hint="a newer process uses this producer id: end this one",
        )
    if header.sequence == producer.last + 1:
        return None
    if header.sequence > producer.last:
        raise SequenceGap(
            f"a send is missing: sequence {header.sequence} after {producer.last}",
            hint="send again from the first unacknowledged one",
        )
    for sequence, offset, stored_at in producer.receipts:
        if sequence == header.sequence:
            _refuse_partly_stored(header, producer.last)
            return Outcome(reply=SendReceipt(offset, stored_at, duplicate=True))
    raise _receipt_forgotten(header, last=producer.last)


def _refuse_partly_stored(header: BatchHeader, last: int) -> None:
    """Refuse a batch of which another sender has sent only the first rows."""
    if last >= header.sequence + header.count - 1:
        return
    raise StaleTopic(
        f"of the batch from sequence {header.sequence} on, only rows to {last} are stored",
        hint="send its rows one by one, each with its sequence",
        detail={"last": last},
    )


def _receipt_forgotten(header: BatchHeader, **last: object) -> UnknownProducer:
    return UnknownProducer(
        f"producer {header.producer_id.hex()} has no receipt of sequence {header.sequence}",
        hint="it may have been stored: search for the message id before sending again",
        detail=last,
    )


def _add_receipt(
    producers: dict[bytes, ProducerState],
    event: BatchStored | BatchQueued | BatchDelayed,
    offset: int,
    stored_at: int,
) -> None:
    producer = producers.get(event.producer)
    if producer is None or event.epoch > producer.epoch:
        owner = "" if producer is None else producer.owner
        producer = producers[event.producer] = ProducerState(event.epoch, -1, stored_at, owner)
    producer.last = event.sequence + event.count - 1
    producer.seen_at = stored_at
    producer.receipts.append((event.sequence, offset, stored_at))


def _record_send(
    state: State, event: BatchStored | BatchQueued | BatchDelayed, offset: int, stored_at: int
) -> None:
    _add_receipt(state.producers, event, offset, stored_at)
    state.dirty_producers.add(event.producer)


def apply_skipped(state: State, event: SequencesSkipped, context: RecordContext) -> None:
    producer = state.producers.get(event.producer)
    if producer is None or event.epoch > producer.epoch:
        owner = "" if producer is None else producer.owner
        producer = ProducerState(event.epoch, -1, context.stored_at, owner)
        state.producers[event.producer] = producer
    producer.last, producer.seen_at = event.last, context.stored_at
    state.dirty_producers.add(event.producer)


def apply_stored(state: State, event: BatchStored, context: RecordContext) -> None:
    _publish(state, event, context.attachment_position, context)


def _publish(state: State, event: BatchStored, position: int, context: RecordContext) -> None:
    topic = state.topics_by_id[event.topic_id]
    lost_batches.move_end(state, topic, event.partition, event.base_offset, event.count, context)
    topic.partition_bytes[event.partition] += event.length
    topic.published_bytes += event.length
    state.dirty_topics.add(event.topic_id)
    state.topics_with_new_entries.add(event.topic_id)
    state.entries.put(
        t.ENTRY_KEY.pack(event.topic_id, event.partition, event.base_offset),
        t.BatchEntry(
            position, event.length, event.count, context.stored_at, event.tag_filter, context.end
        ),
    )
    _record_send(state, event, event.base_offset, context.stored_at)


def with_positions(
    event: BatchesStored, context: RecordContext
) -> Iterator[tuple[BatchStored, int]]:
    """Yield the events of a shared record, each with the position of its batch."""
    position = context.attachment_position
    for fields in event.batches:
        one = fields if type(fields) is BatchStored else BatchStored(*fields)
        yield one, position
        position += one.length


def apply_stored_batches(state: State, event: BatchesStored, context: RecordContext) -> None:
    for one, position in with_positions(event, context):
        _publish(state, one, position, context)


def apply_queued(state: State, event: BatchQueued, context: RecordContext) -> None:
    batch = key_order.UnplacedBatch(
        event.topic_id,
        event.partition,
        context.attachment_position,
        event.length,
        event.count,
        event.tag_filter,
        event.hashes,
    )
    state.tables[t.QUEUED].put(t.TICKET_KEY.pack(context.position), batch)
    key_order.hold_keys(state, context.position, None, (batch,))
    _record_send(state, event, -1, context.stored_at)


def apply_delayed(state: State, event: BatchDelayed, context: RecordContext) -> None:
    delay_rules.apply_delayed(state, event, context)
    _record_send(state, event, -1, context.stored_at)


DECIDERS: Deciders = {
    StoreBatch: decide_store_batch,
    StoreBatches: decide_store_batches,
    SkipSequences: decide_skip,
}
APPLIERS: Appliers = {
    BatchStored: apply_stored,
    BatchesStored: apply_stored_batches,
    BatchQueued: apply_queued,
    BatchDelayed: apply_delayed,
    SequencesSkipped: apply_skipped,
}
