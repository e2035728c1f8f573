"""The messages that a member has fetched and that are not settled.

A message may be delivered again while it is here: its lease ran out, or the broker lost
the record of it in a power cut. A message that was not received yet is then received
from the newer delivery. One that is outstanding stays so; the newer delivery's message
is its DUPLICATE and is settled with it. A duplicate lives as long as its connection:
only then do leases tell which delivery an answer of the broker is about.

In an ordered group, earlier messages of the key may be delivered again as well: the
broker has lost their acks. Then the outstanding delivery ends without effect, and its
duplicate is received behind those (`redeliver`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from txmq.batch import rows_with_tag
from txmq.client.protocol.consumer.fetched import (
    DUPLICATE,
    IN_TRANSACTION,
    NACKED,
    OUTSTANDING,
    READY,
    SETTLED,
    DeliveredMessage,
    FetchedBatch,
    ReceivedBatch,
    build_messages,
)
from txmq.client.protocol.consumer.key_queues import (
    ArrivalQueue,
    BatchOrder,
    KeyQueues,
    MessageOrder,
    PartitionQueues,
)
from txmq.errors import LocalProtocolError
from txmq.model.keys import key_hash
from txmq.model.topic_partition import PartitionName
from txmq.selector import Selector
from txmq.wire.data_requests import AckedRange

UNSETTLED = (OUTSTANDING, NACKED, IN_TRANSACTION)


class _PartitionBatches:
    """The batches of one partition with unsettled messages.

    All offsets are below `top`. `overlapping`: one offset may be in several batches.
    """

    __slots__ = ("batches", "overlapping", "top")

    def __init__(self) -> None:
        self.batches: dict[FetchedBatch, None] = {}
        self.top = 0
        self.overlapping = False


class LocalQueue:
    """The state of all fetched messages. Not thread-safe.

    `ready` and `ready_bytes`: messages and bytes that wait to be received.
    """

    def __init__(
        self,
        *,
        ordered: bool,
        tags: frozenset[str] | None = None,
        selector: Selector | None = None,
        keeps_bodies: bool = False,
    ) -> None:
        """`keeps_bodies`: until a message is settled, for `message_at`."""
        self._ordered, self._tags, self._selector = ordered, tags, selector
        self._keeps_batches = ordered or keeps_bodies
        self._partitions: dict[PartitionName, _PartitionBatches] = {}
        # Not in an order yet: the first receive decides between messages and batches.
        self._new: list[FetchedBatch] = []
        self._messages: MessageOrder | None = None
        self._batches: BatchOrder | None = None
        self.ready = self.ready_bytes = 0

    def add(self, batch: FetchedBatch) -> list[AckedRange]:
        """Add a fetched batch. Return the messages that tags and selector leave out."""
        partition = self._partitions.setdefault(batch.partition_name, _PartitionBatches())
        self.ready += batch.ready
        self.ready_bytes += batch.size
        if batch.start < partition.top:
            self._merge_overlap(partition, batch)
        partition.batches[batch] = None
        partition.top = max(partition.top, batch.end)
        unwanted = list(self._unwanted(batch))
        for _topic, _partition, start, end in unwanted:
            self._change_ready(batch, start, end, SETTLED)
        if batch.ready or (self._ordered and batch.unsettled):
            self._new.append(batch)
        else:
            self._remove_if_settled(batch)
        return unwanted

    def _unwanted(self, batch: FetchedBatch) -> Iterator[AckedRange]:
        if batch.accepted or (self._tags is None and self._selector is None):
            return
        at = batch.start
        for offset in self._wanted(batch):
            if at < offset:
                yield AckedRange(*batch.partition_name, at, offset)
            at = offset + 1
        if at < batch.end:
            yield AckedRange(*batch.partition_name, at, batch.end)

    def _wanted(self, batch: FetchedBatch) -> Iterator[int]:
        view, base = batch.view, batch.base
        rows = range(batch.start - base, batch.end - base)
        tagged = (
            rows
            if self._tags is None
            else (row for row in rows_with_tag(view, self._tags) if row in rows)
        )
        for row in tagged:
            key, tag = view.keys[row], view.tags[row]
            if self._selector is None or self._selector.matches(
                view.headers[row], key=key, tag=tag, topic=batch.topic
            ):
                yield base + row

    def _merge_overlap(self, partition: _PartitionBatches, batch: FetchedBatch) -> None:
        for other in list(partition.batches):
            if other.start >= batch.end or other.end <= batch.start:
                continue
            partition.overlapping = True
            self._change_ready(other, batch.start, batch.end, SETTLED)
            for state in (*UNSETTLED, DUPLICATE):
                for _topic, _partition, start, end in list(other.ranges(state)):
                    self._change_ready(batch, start, end, DUPLICATE)
            self._remove_if_settled(other)

    def pop_many(self, most: int = 1, *, now: float) -> list[DeliveredMessage]:
        """Return at most so many messages, to be processed in their order.

        Several may be of one key.
        """
        order = (
            self._messages
            if self._messages is not None and not self._new
            else self._message_order()
        )
        return [self._deliver(batch, offset, now) for batch, offset in order.pop_many(most)]

    def pop(self, *, now: float) -> DeliveredMessage | None:
        """Return the next message; the hot path of `pop_many`."""
        order = (
            self._messages
            if self._messages is not None and not self._new
            else self._message_order()
        )
        entry = order.pop()
        if entry is None:
            return None
        batch, offset = entry
        return self._deliver(batch, offset, now)

    def _deliver(self, batch: FetchedBatch, offset: int, now: float) -> DeliveredMessage:
        message = batch.deliver(offset, now)
        self.ready -= 1
        if not batch.ready:
            self._on_none_ready(batch)
        return message

    def pop_batch(self, *, now: float) -> ReceivedBatch | None:
        """Return the READY messages of one delivery."""
        batch = self._batch_order().pop_batch()
        if batch is None:
            return None
        received = ReceivedBatch(batch, batch.offsets(READY))
        batch.touched_at, batch.received_whole = now, True
        self._change_ready(batch, batch.start, batch.end, OUTSTANDING)
        return received

    def _message_order(self) -> MessageOrder:
        if self._messages is None:
            if self._batches is not None:
                raise _mixed()
            if self._ordered:
                self._messages = KeyQueues()
            else:
                self._messages = self._batches = ArrivalQueue()
        self._put_new(self._messages)
        return self._messages

    def _batch_order(self) -> BatchOrder:
        if self._batches is None:
            if self._messages is not None:
                raise _mixed()
            if self._ordered:
                self._batches = PartitionQueues()
            else:
                self._messages = self._batches = ArrivalQueue()
        self._put_new(self._batches)
        return self._batches

    def _put_new(self, order: MessageOrder | BatchOrder) -> None:
        if self._new:
            for batch in self._new:
                if batch.unsettled:
                    order.put(batch)
            self._new.clear()

    def settle_one(self, message: DeliveredMessage, *, now: float) -> bool:
        """Settle a message; return whether it was outstanding. The hot path of
        `settle`.
        """
        batch, offset = message.fetched, message[2]
        if self._partitions[batch.partition_name].overlapping:
            place = AckedRange(*batch.partition_name, offset, offset + 1)
            if not message.in_hand:  # a newer delivery may be: it is another handler's
                return False
            return not self.redeliver(place) and self.settle(place, now=now) > 0
        if not batch.settle(offset, now):
            return False
        if not batch.unsettled:
            self._remove_if_settled(batch)
        if self._ordered:
            self._order().on_one_settled(batch.topic, batch.partition, offset)
        return True

    def settle(
        self,
        done: AckedRange,
        batch: FetchedBatch | None = None,
        *,
        now: float,
        old: int = OUTSTANDING,
    ) -> int:
        """Settle the messages of a range that are in state `old`; return their number.

        `batch`: where they are, if the caller knows.
        """
        partition = self._partitions.get(done[:2])
        if partition is None:
            return 0
        count, overlapping = 0, partition.overlapping
        for one in [batch] if batch is not None and not overlapping else list(partition.batches):
            settled = one.change(done.start, done.end, old, SETTLED)
            duplicates = overlapping and one.change(done.start, done.end, DUPLICATE, SETTLED)
            if settled or duplicates:
                one.touched_at = now
                count += settled
                self._remove_if_settled(one)
        if count:
            self._order().on_settled(done, count)
        return count

    def _order(self) -> MessageOrder | BatchOrder:
        order = self._messages or self._batches
        assert order is not None, "what is outstanding was received from it"
        return order

    def change(self, messages: AckedRange, old: int, new: int) -> int:
        """Change the messages of a range from one unsettled state to another; return
        their number.
        """
        partition = self._partitions.get(messages[:2])
        batches = partition.batches if partition is not None else ()
        return sum(batch.change(messages.start, messages.end, old, new) for batch in batches)

    def is_outstanding(self, topic: str, partition: int, offset: int) -> bool:
        """Return whether the user has received this message and not settled it."""
        return self._outstanding_in(topic, partition, offset) is not None

    def _outstanding_in(self, topic: str, partition: int, offset: int) -> FetchedBatch | None:
        found = self._partitions.get((topic, partition))
        for batch in found.batches if found is not None else ():
            if batch.start <= offset < batch.end and batch.state(offset) == OUTSTANDING:
                return batch
        return None

    def delivery(
        self, messages: AckedRange, state: int, lease: int = 0, after: float = inf
    ) -> FetchedBatch | None:
        """Return the batch that has a message of this range in that state and was
        delivered under that lease or a later one, or after that generation.
        """
        partition = self._partitions.get(messages[:2])
        for batch in partition.batches if partition is not None else ():
            is_later = batch.lease >= lease or batch.generation > after
            if is_later and batch.count(messages.start, messages.end, state):
                return batch
        return None

    def redeliver(self, messages: AckedRange, *, old: int = OUTSTANDING) -> bool:
        """End the delivery of messages in state `old` if earlier ones of their key wait
        to be received, so were delivered again. They are received again behind those.

        Return whether it is so. Where batches are received, a partition is like a key.
        """
        partition = self._partitions.get(messages[:2])
        if partition is None or not partition.overlapping or not self._ordered:
            return False
        if not self._earlier_are_ready(partition, messages):
            return False
        count, (_topic, _partition, start, end) = 0, messages
        for batch in list(partition.batches):
            count += batch.change(start, end, old, SETTLED)
            if not batch.ready and batch.count(start, end, DUPLICATE):
                self.ready_bytes += batch.size
            self.ready += batch.change(start, end, DUPLICATE, READY)
            self._remove_if_settled(batch)
        self._order().on_settled(messages, count)
        return True

    def _earlier_are_ready(self, partition: _PartitionBatches, messages: AckedRange) -> bool:
        below = messages.start
        before = [batch for batch in partition.batches if batch.ready and batch.start < below]
        if self._batches is not None:
            return any(batch.count(batch.start, below, READY) for batch in before)
        own = next(one for one in partition.batches if one.start <= below < one.end)
        key = own.key_hash(below)
        return key is not None and any(
            offset < below for batch in before for offset in batch.with_key(key, READY)
        )

    def has_earlier_in_hand(self, place: AckedRange) -> bool:
        """Return whether the user has an earlier message of the key in hand, in an
        ordered group.
        """
        partition, below = self._partitions.get(place[:2]), place.start
        if partition is None or not self._ordered:
            return False
        batches = [batch for batch in partition.batches if batch.start <= below]
        own = next((batch for batch in batches if below < batch.end), None)
        key = None if own is None else own.key_hash(below)
        return key is not None and any(
            offset < below
            for batch in batches
            for offset in batch.with_key(key, OUTSTANDING, IN_TRANSACTION)
        )

    def drop_duplicates(self) -> None:
        """Drop all duplicates. Their messages are outstanding in older deliveries,
        which stand for the newer leases from now on.
        """
        for batch in self.batches():
            for place in list(batch.ranges(DUPLICATE)):
                self._stand_for(place, batch.generation)
            if batch.change(batch.start, batch.end, DUPLICATE, SETTLED):
                self._remove_if_settled(batch)

    def _stand_for(self, place: AckedRange, generation: int) -> None:
        """Give the messages of a range that the user has that generation."""
        for batch in self._partitions[place[:2]].batches:
            for offset in range(max(place.start, batch.start), min(place.end, batch.end)):
                if batch.state(offset) in UNSETTLED:
                    batch.later[offset] = generation

    def unsettled(self) -> list[AckedRange]:
        """Return the messages that were received and are not settled."""
        return [
            found
            for batch in self.batches()
            for state in UNSETTLED
            for found in batch.ranges(state)
        ]

    def drop_ready(self, which: Callable[[FetchedBatch], bool] | None = None) -> list[AckedRange]:
        """Drop READY messages, of these batches or of all. Return them."""
        dropped: list[AckedRange] = []
        for batch in [
            batch for batch in self.batches() if batch.ready and (which is None or which(batch))
        ]:
            dropped += batch.ranges(READY)
            self._change_ready(batch, batch.start, batch.end, SETTLED)
            self._remove_if_settled(batch)
        return dropped

    def forget(self, which: Callable[[FetchedBatch], bool], *, now: float) -> None:
        """Settle all messages of these batches, whose leases are over. What their
        handlers do with them has no effect any more.
        """
        self.drop_ready(which)
        for batch in list(filter(which, self.batches())):
            for state in (OUTSTANDING, NACKED):
                for messages in list(batch.ranges(state)):
                    self.settle(messages, batch, now=now, old=state)

    def drop_key(self, topic: str, key: str, lease: int) -> list[AckedRange]:
        """Drop READY messages of a key under leases below `lease`. Return them."""
        dropped: list[AckedRange] = []
        older = [
            batch
            for batch in self.batches()
            if batch.ready and batch.topic == topic and batch.lease < lease
        ]
        if not older:
            return dropped
        wanted = key_hash(key)
        for batch in older:
            for offset in batch.with_key(wanted, READY):
                dropped.append(AckedRange(*batch.partition_name, offset, offset + 1))
                self._change_ready(batch, offset, offset + 1, SETTLED)
            self._remove_if_settled(batch)
        return dropped

    def message_at(self, place: AckedRange) -> DeliveredMessage | None:
        """Return a NACKED message, whose batch is kept; None if it is not there."""
        partition = self._partitions.get(place[:2])
        for batch in partition.batches if partition is not None else ():
            if batch.start <= place.start < batch.end and batch.state(place.start) == NACKED:
                return _rebuilt(batch, place.start)
        return None

    def take_key(self, topic: str, key: str) -> list[DeliveredMessage]:
        """Make the READY messages of a key NACKED, and return them in their order."""
        taken, wanted = [], key_hash(key)
        for batch in sorted(self.batches(), key=lambda one: (one.partition_name, one.start)):
            if batch.topic != topic or not batch.ready:
                continue
            for offset in batch.with_key(wanted, READY):
                taken.append(_rebuilt(batch, offset))
                self._change_ready(batch, offset, offset + 1, NACKED)
        return taken

    def leases(self) -> set[int]:
        """Return the leases of all unsettled messages."""
        return {batch.lease for batch in self.batches()}

    def restart_timeout(self, topic: str, partition: int, offset: int, start: float) -> bool:
        """Count the consume timeout of a message from that time; return whether it is
        outstanding.
        """
        batch = self._outstanding_in(topic, partition, offset)
        if batch is None:
            return False
        batch.timed_from[offset] = start
        return True

    def batches(self) -> list[FetchedBatch]:
        """Return all batches with unsettled messages."""
        return [batch for partition in self._partitions.values() for batch in partition.batches]

    def _change_ready(self, batch: FetchedBatch, start: int, end: int, state: int) -> None:
        """Change READY messages of these offsets to another state."""
        if batch.ready:
            self.ready -= batch.change(start, end, READY, state)
            if not batch.ready:
                self._on_none_ready(batch)

    def _on_none_ready(self, batch: FetchedBatch) -> None:
        self.ready_bytes -= batch.size
        if not self._keeps_batches:  # else the key is needed when a handler gives up
            batch.release()

    def _remove_if_settled(self, batch: FetchedBatch) -> None:
        partition = self._partitions[batch.partition_name]
        if not batch.unsettled:
            partition.batches.pop(batch, None)
            batch.release()
        if not partition.batches:
            partition.top, partition.overlapping = 0, False


def _rebuilt(batch: FetchedBatch, offset: int) -> DeliveredMessage:
    [message] = build_messages(batch, batch.view, offset, offset + 1)
    message.fetched = batch
    return message


def _mixed() -> LocalProtocolError:
    return LocalProtocolError(
        "an ordered consumer receives single messages or batches, not both",
        hint="take either: receive() and iteration, or receive_batch() and batches()",
    )
