"""Batches ready to send: split to size, routed to a partition, numbered within one
producer session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import uuid4

from txmq.client.protocol.sender.accumulator import (
    IN_TURN,
    UNROUTED,
    Destination,
    PendingBatch,
)
from txmq.client.protocol.sender.promise import Promise
from txmq.client.protocol.sender.rows import (
    BATCH_BYTES,
    BATCH_ROWS,
    SMALL_BATCH_BYTES,
    MessageRows,
    batch_bounds,
    estimated_size,
    row_limit,
)
from txmq.client.protocol.sender.topics import TopicCache, TopicMetadata
from txmq.errors import LocalProtocolError, TxmqError
from txmq.model import limits
from txmq.model.message import Receipt
from txmq.wire.data_requests import send_header
from txmq.wire.hello import BrokerLimits


@dataclass(slots=True)
class SequencedBatch:
    """A batch with its sequence and payload. `doubtful`: an earlier attempt may have
    been stored.
    """

    pending: PendingBatch
    prefix: str  # of the message ids
    sequence: int
    payload: tuple[bytes, bytes]  # header and batch
    doubtful: bool = False
    refusal: TxmqError | None = None

    @property
    def futures(self) -> list[Promise[Receipt]]:
        return self.pending.futures

    @property
    def size(self) -> int:
        return self.pending.size

    @property
    def appended_at(self) -> float:
        """The time at which the last of its messages was appended."""
        return self.pending.append_times[-1]


class Batcher:
    """Pending batches in the order of sending. `fail` is called for those that cannot
    be sent.

    Batches are small until quick receipts show that the broker's disk follows. Large
    ones of the first seconds would stand before decisions, behind a disk that does not.
    """

    def __init__(self, topics: TopicCache, fail: Callable[[PendingBatch, TxmqError], None]) -> None:
        self._topics, self._fail = topics, fail
        self.queue: deque[PendingBatch] = deque()
        self._batch_bytes = SMALL_BATCH_BYTES  # of further batches
        self.renew_session()

    def renew_session(self) -> None:
        """Begin a new producer session, for all batches from here on."""
        self._producer_id = uuid4().bytes
        self._prefix = f"{self._producer_id.hex()}-"
        self._sequence = 0

    def shrink_batches(self) -> None:
        """Make small batches from here on."""
        self._batch_bytes = SMALL_BATCH_BYTES

    def grow_batches(self, stored: int) -> None:
        """Make larger batches, after a quick receipt for so many bytes. Batches of the
        present size must have been as quick: others of the same moment do not count.
        """
        if stored > self._batch_bytes // 2:
            self._batch_bytes = min(2 * self._batch_bytes, BATCH_BYTES)

    def requeue(self, batches: Iterable[PendingBatch]) -> None:
        """Put batches before all others, in their order."""
        self.queue.extendleft(reversed(list(batches)))

    def next(self, broker_limits: BrokerLimits) -> SequencedBatch | None:
        """Return the next batch to send, or None without one."""
        return self._next(self._split, broker_limits.message)

    def next_to_store(self) -> SequencedBatch | None:
        """Return the next batch to store on disk, or None without one.

        The messages of a topic that is not known come one by one, UNROUTED: each will
        have its own partition.
        """
        return self._next(self._split_to_store, limits.MESSAGE)

    def _next(
        self, split: Callable[[PendingBatch], PendingBatch | None], max_body: int
    ) -> SequencedBatch | None:
        while self.queue:
            pending = split(self.queue.popleft())
            if pending is not None:
                self.queue.appendleft(pending)  # an interrupt must not lose it
                batch = self._encode(pending, max_body)
                self.queue.popleft()
                if batch is not None:
                    return batch
        return None

    def _split(self, batch: PendingBatch) -> PendingBatch | None:
        """Return the first part that fits in a frame, for one partition. The rest goes
        back to the queue.
        """
        destination, topic = batch.destination, self._topics.cached(batch.destination.topic)
        if destination.partition == IN_TURN or (destination.partition == UNROUTED and not topic):
            # Without metadata the topic is gone: the broker will refuse the batch.
            partition = self._topics.next_partition(topic) if topic else 0
            epoch = topic.epoch if topic else destination.epoch
            batch.destination = Destination(destination.topic, partition, epoch, explicit=False)
        elif topic and destination.epoch != topic.epoch:
            self._reroute(batch, topic)
            return None
        max_rows = row_limit(batch.messages, BATCH_ROWS)
        if batch.size <= self._batch_bytes and len(batch.messages) <= max_rows:
            return batch
        sizes = list(map(estimated_size, batch.messages))
        bounds = batch_bounds(sizes, max_rows, self._batch_bytes)
        first, *rest = (batch.slice_rows(*ends) for ends in bounds)
        self.requeue(rest)
        return first

    def _split_to_store(self, batch: PendingBatch) -> PendingBatch | None:
        destination = batch.destination
        if destination.partition >= 0 or self._topics.cached(destination.topic):
            return self._split(batch)
        batch.destination = destination._replace(partition=UNROUTED, epoch=0)
        first, *rest = (batch.slice_rows(row, row + 1) for row in range(len(batch.messages)))
        self.requeue(rest)
        return first

    def _reroute(self, batch: PendingBatch, topic: TopicMetadata) -> None:
        """Split a batch by the topic's new partitions: keys may have moved."""
        old, places = batch.destination, dict[int, list[int]]()
        for at, message in enumerate(batch.messages):
            try:
                partition = (
                    old.partition
                    if old.explicit
                    else self._topics.choose_partition(topic, message.key)
                )
            except Exception as error:  # noqa: BLE001  # a partitioner is the user's code
                hint = (
                    "it is called with topic, key and the number of partitions,"
                    " and returns one of them"
                )
                refusal = LocalProtocolError(
                    f"the partitioner raised {type(error).__name__}", hint=hint
                )
                self._fail(batch.slice_rows(at, at + 1), refusal)
            else:
                places.setdefault(partition, []).append(at)
        self.requeue(
            batch.select_rows(Destination(old.topic, partition, topic.epoch, old.explicit), chosen)
            for partition, chosen in places.items()
        )

    def _encode(self, batch: PendingBatch, max_body: int) -> SequencedBatch | None:
        rows = MessageRows(batch.messages, batch.births)
        compression = self._topics.compression
        if batch.size <= max_body:  # then no body exceeds it
            max_body = limits.MESSAGE
        try:
            encoded = rows.encode(self._producer_id, self._sequence, compression, max_body)
        except TxmqError as error:
            self._fail(batch, error)
            return None
        topic, partition, epoch, _explicit = batch.destination
        # On disk an UNROUTED batch has no header of a request.
        header = b"" if partition == UNROUTED else send_header(topic, partition, epoch)
        payload = (header, encoded)
        sequenced = SequencedBatch(batch, self._prefix, self._sequence, payload)
        self._sequence += len(batch.messages)
        return sequenced
