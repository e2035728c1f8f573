"""The order in which messages of the local queue are delivered.

Concurrent and broadcast groups: in the order of arrival (`ArrivalQueue`). Ordered
groups: a message waits until the one of its key before it is settled (`KeyQueues`).
Where whole batches are received, a batch waits for the one of its partition before it
(`PartitionQueues`).

A message may stop being READY while it is in a queue, because it was returned or
delivered anew. Queues skip such messages. The queues of ordered groups also hold each
DUPLICATE in its place: it is READY again where its older delivery ends without effect.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol, TypeAlias

from txmq.client.protocol.consumer.fetched import DUPLICATE, READY, FetchedBatch
from txmq.model.topic_partition import PartitionName
from txmq.wire.data_requests import AckedRange

Entry: TypeAlias = tuple[FetchedBatch, int]  # a message: its batch and its offset
TopicKey: TypeAlias = tuple[str, str | None]  # a topic and a key


class DeliveryOrder(Protocol):
    """An order of delivery, kept up to date by `put` and the calls on settlement."""

    def put(self, batch: FetchedBatch) -> None:
        """Add the READY messages of a batch, and its duplicates."""

    def on_settled(self, settled: AckedRange, count: int) -> None:
        """Note that `count` outstanding messages of this range are settled."""

    def on_one_settled(self, topic: str, partition: int, offset: int) -> None:
        """Note that one message is settled; cheaper than `on_settled`."""


class MessageOrder(DeliveryOrder, Protocol):
    """An order of single messages. The caller marks what it gets as OUTSTANDING."""

    def pop_many(self, most: int) -> list[Entry]:
        """Return at most so many messages that may be delivered together, in the order
        in which they are to be processed.
        """

    def pop(self) -> Entry | None:
        """Return the next message; cheaper than `pop_many`."""


class BatchOrder(DeliveryOrder, Protocol):
    """An order of batches. The caller marks the READY messages as OUTSTANDING."""

    def pop_batch(self) -> FetchedBatch | None:
        """Return a batch whose READY messages may be delivered."""


class ArrivalQueue:
    """Messages in the order of arrival; both a MessageOrder and a BatchOrder."""

    def __init__(self) -> None:
        self._batches: deque[FetchedBatch] = deque()
        self._row = 0  # rows of the first batch before this one are not READY

    def put(self, batch: FetchedBatch) -> None:
        self._batches.append(batch)

    def pop_many(self, most: int) -> list[Entry]:
        entries: list[Entry] = []
        while len(entries) < most and (entry := self.pop()) is not None:
            entries.append(entry)
        return entries

    def pop(self) -> Entry | None:
        batches = self._batches
        while batches:
            batch = batches[0]
            row = batch.states.find(READY, self._row)
            if row >= 0:
                self._row = row + 1
                return batch, batch.start + row
            batches.popleft()
            self._row = 0
        return None

    def pop_batch(self) -> FetchedBatch | None:
        batches = self._batches
        while batches:
            if batches[0].states.find(READY, self._row) >= 0:
                return batches[0]
            batches.popleft()
            self._row = 0
        return None

    def on_settled(self, settled: AckedRange, count: int) -> None:
        """Nothing waits for what is settled."""

    def on_one_settled(self, topic: str, partition: int, offset: int) -> None:
        """Nothing waits for what is settled."""


class _KeyQueue:
    """The messages of one key that wait for each other, and the number of those that
    are outstanding.
    """

    __slots__ = ("key", "outstanding", "waiting")

    def __init__(self, key: TopicKey) -> None:
        self.key = key
        self.waiting: deque[Entry] = deque()
        self.outstanding = 0

    def pop(self) -> Entry | None:
        """Return the first message that is still READY."""
        while self.waiting:
            batch, offset = self.waiting.popleft()
            if batch.states[offset - batch.start] == READY:
                return batch, offset
        return None


class KeyQueues:
    """Keys side by side, the messages of one key one after the other.

    Messages without a key wait for nothing. `pop` takes messages as they arrived and
    makes a queue only for a key that is outstanding. `pop_many` gives the caller the
    messages of a key in a row, and leaves other keys to other callers: for that it
    sorts all that has arrived into queues.
    """

    def __init__(self) -> None:
        self._arrivals = ArrivalQueue()
        # Keys with outstanding or waiting messages. None: one outstanding, none waits.
        self._queues: dict[TopicKey, _KeyQueue | None] = {}
        self._free: deque[_KeyQueue] = deque()  # waiting messages, and none outstanding
        self._outstanding: dict[tuple[str, int, int], TopicKey] = {}

    def put(self, batch: FetchedBatch) -> None:
        if DUPLICATE not in batch.states:
            self._arrivals.put(batch)
            return
        self._sort_arrivals()
        for row, state in enumerate(batch.states):
            if state in {READY, DUPLICATE}:
                self._wait(batch, batch.start + row)

    def pop_many(self, most: int) -> list[Entry]:
        self._sort_arrivals()
        entries: list[Entry] = []
        while self._free and len(entries) < most:
            queue = self._free.popleft()
            while len(entries) < most and (entry := queue.pop()) is not None:
                entries.append(self._mark_outstanding(entry, queue))
            if not queue.outstanding:
                self._queues.pop(queue.key, None)
        return entries

    def pop(self) -> Entry | None:
        while self._free:
            queue = self._free.popleft()
            if (entry := queue.pop()) is not None:
                return self._mark_outstanding(entry, queue)
            self._queues.pop(queue.key, None)
        while (entry := self._arrivals.pop()) is not None:
            batch, offset = entry
            key = (batch.topic, batch.view.keys[offset - batch.base])
            if key[1] is None:
                return entry
            if key not in self._queues:
                self._queues[key] = None
                self._outstanding[batch.topic, batch.partition, offset] = key
                return entry
            self._queue_of(key).waiting.append(entry)
        return None

    def on_settled(self, settled: AckedRange, count: int) -> None:
        for offset in _offsets(settled, count, self._outstanding):
            self.on_one_settled(settled.topic, settled.partition, offset)

    def on_one_settled(self, topic: str, partition: int, offset: int) -> None:
        key = self._outstanding.pop((topic, partition, offset), None)
        if key is None:
            return
        queue = self._queues[key]
        if queue is None:
            del self._queues[key]
            return
        queue.outstanding -= 1
        if queue.outstanding:
            return
        if queue.waiting:
            self._free.append(queue)
        else:
            del self._queues[key]

    def _sort_arrivals(self) -> None:
        while (entry := self._arrivals.pop()) is not None:
            self._wait(*entry)

    def _wait(self, batch: FetchedBatch, offset: int) -> None:
        """Put a message behind those of its key."""
        queue = self._queue_of((batch.topic, batch.view.keys[offset - batch.base]))
        if not (queue.outstanding or queue.waiting):
            self._free.append(queue)
        queue.waiting.append((batch, offset))

    def _queue_of(self, key: TopicKey) -> _KeyQueue:
        """Return the queue of a key, made if need be; without a key, a new one."""
        if key[1] is None:
            return _KeyQueue(key)
        queue = self._queues.get(key)
        if queue is None:
            queue = _KeyQueue(key)
            queue.outstanding = int(key in self._queues)
            self._queues[key] = queue
        return queue

    def _mark_outstanding(self, entry: Entry, queue: _KeyQueue) -> Entry:
        batch, offset = entry
        queue.outstanding += 1
        if queue.key[1] is not None:
            self._outstanding[batch.topic, batch.partition, offset] = queue.key
        return entry


class PartitionQueues:
    """Partitions side by side, the batches of one partition one after the other."""

    def __init__(self) -> None:
        self._waiting: dict[PartitionName, deque[FetchedBatch]] = {}
        self._outstanding: Counter[PartitionName] = Counter()

    def put(self, batch: FetchedBatch) -> None:
        self._waiting.setdefault(batch.partition_name, deque()).append(batch)

    def pop_batch(self) -> FetchedBatch | None:
        for name, batches in self._waiting.items():
            if self._outstanding[name] > 0:
                continue
            while batches and not batches[0].ready:
                batches.popleft()
            if batches:
                batch = batches.popleft()
                self._waiting[name] = self._waiting.pop(name)  # other partitions first, next time
                self._outstanding[name] += batch.ready
                return batch
        return None

    def on_settled(self, settled: AckedRange, count: int) -> None:
        self._outstanding[settled.topic, settled.partition] -= count

    def on_one_settled(self, topic: str, partition: int, offset: int) -> None:
        self._outstanding[topic, partition] -= 1


def _offsets(
    settled: AckedRange, count: int, outstanding: dict[tuple[str, int, int], TopicKey]
) -> Iterable[int]:
    """Return the offsets of the range that may be outstanding.

    A range much wider than `count` is not gone through one by one.
    """
    if settled.end - settled.start <= max(count, 1) * 4:
        return range(settled.start, settled.end)
    name = settled[:2]
    return [
        offset
        for *place, offset in outstanding
        if tuple(place) == name and settled.start <= offset < settled.end
    ]
