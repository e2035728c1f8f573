"""The buffer of a transaction's sends and actions, and the batches built from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple
from uuid import UUID

from txmq.client.protocol.sender.rows import PART_ROWS, ColumnRows, MessageRows, Rows, frozen
from txmq.client.protocol.sender.topics import TopicCache, TopicMetadata
from txmq.model.actions import BundleAction
from txmq.model.causation import current_cause, with_cause
from txmq.model.message import Message, Receipt
from txmq.model.own_topics import check_topic
from txmq.wire.bundle import PartBatch


class BufferedSend(NamedTuple):
    """One call of `send` or `send_many`; `requested_partition` None = by the key."""

    topic: str
    content: Message | Rows
    born_at: int
    requested_partition: int | None

    @property
    def message_count(self) -> int:
        """The number of its messages: one, or the rows of its columns."""
        return 1 if isinstance(self.content, Message) else len(self.content)

    def messages(self) -> list[Message]:
        """Return its messages, one by one."""
        rows = self.content
        if isinstance(rows, Message):
            return [rows]
        assert isinstance(rows, ColumnRows), "others are for jobs"
        keys, tags = rows.keys or [None] * len(rows), rows.tags or [None] * len(rows)
        return list(map(Message, rows.bodies, keys, tags))


class BufferPosition(NamedTuple):
    """The length of a buffer at a savepoint."""

    items: int
    actions: int


@dataclass(slots=True)
class PartitionRows:
    """Rows of one partition, in order.

    `message_indexes` are the indexes of the messages among all sends of the
    transaction.
    """

    topic: str
    partition: int
    epoch: int
    rows: list[Rows] = field(default_factory=list)
    message_indexes: list[int] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _births: list[int] = field(default_factory=list)

    def add(self, message: Message, born_at: int, index: int) -> None:
        self._messages.append(message)
        self._births.append(born_at)
        self.message_indexes.append(index)

    def add_columns(self, columns: Rows, indexes: Sequence[int]) -> None:
        self.close()
        self.rows.append(columns)
        self.message_indexes.extend(indexes)

    def close(self) -> None:
        """Turn the single messages so far into rows."""
        if self._messages:
            self.rows.append(MessageRows(self._messages, self._births))
            self._messages, self._births = [], []


class BuiltBatches(NamedTuple):
    """The batches of a bundle in their order.

    For each batch, the indexes of its messages among all sends of the transaction.
    """

    batches: list[PartBatch]
    message_indexes: list[Sequence[int]]

    def first(self, count: int) -> BuiltBatches:
        """Return so many batches, the first ones."""
        return BuiltBatches(self.batches[:count], self.message_indexes[:count])

    def receipts(
        self, token: UUID, offsets: Sequence[int | None], first_number: int = 0
    ) -> list[Receipt]:
        """Return the receipts in the order of the sends, given the batches' offsets."""
        receipts: dict[int, Receipt] = {}
        for batch, indexes, base in zip(self.batches, self.message_indexes, offsets, strict=True):
            for row, index in enumerate(indexes):
                message_id = f"{token.hex}-{first_number + len(receipts)}"
                offset = None if base is None else base + row
                receipts[index] = Receipt(
                    message_id, batch.topic, batch.partition, offset, duplicate=False
                )
        return [receipts[index] for index in sorted(receipts)]


class Buffer:
    """Sends and actions of a transaction at one broker, in order."""

    def __init__(self, topics: TopicCache) -> None:
        self._topics = topics
        self.items: list[BufferedSend] = []
        self.actions: list[BundleAction] = []

    @property
    def empty(self) -> bool:
        """Return whether there are no sends and no actions."""
        return not self.items and not self.actions

    @property
    def message_count(self) -> int:
        """The number of messages of all sends."""
        return sum(send.message_count for send in self.items)

    def position(self) -> BufferPosition:
        """Return the present length."""
        return BufferPosition(len(self.items), len(self.actions))

    def truncate(self, position: BufferPosition) -> None:
        """Withdraw the sends and actions behind a position."""
        del self.items[position.items :]
        del self.actions[position.actions :]

    def clear(self) -> None:
        """Drop everything, once it is built."""
        self.items.clear()
        self.actions.clear()

    def add(
        self, topic: str, message: Message, born_at: int, requested_partition: int | None
    ) -> None:
        """Add a message. Raises LocalProtocolError or MessageTooLarge."""
        check_topic(topic)
        if current_cause.get() is not None:
            message = with_cause(message)
        if self._topics.telemetry is not None:
            message = self._topics.telemetry.create(topic, message)
        self.items.append(BufferedSend(topic, frozen(message), born_at, requested_partition))

    def add_columns(self, topic: str, columns: ColumnRows, requested_partition: int | None) -> None:
        """Add columns, which must not be changed before the end of the transaction."""
        self.items.append(
            BufferedSend(check_topic(topic), columns, columns.born_at, requested_partition)
        )

    def add_rows(self, topic: str, rows: Rows, requested_partition: int | None) -> None:
        """Add rows that know the times of their births."""
        self.items.append(BufferedSend(check_topic(topic), rows, 0, requested_partition))

    def build(
        self,
        token: UUID,
        sequence: int = 0,
        max_rows: int = PART_ROWS,
        *,
        stored: BuiltBatches | None = None,
    ) -> BuiltBatches:
        """Build batches of at most `max_rows` rows, for the topics as they are cached.

        `sequence` is the number of the first message within the bundle. Batches that
        are `stored` stay as they are, and others follow them.
        """
        if len(self.items) == 1 and isinstance(message := self.items[0].content, Message):
            return self._build_one(message, token.bytes, sequence)
        built = stored or BuiltBatches([], [])
        done = frozenset(chain.from_iterable(built.message_indexes))
        sequence += len(done)
        for target in self._rows_by_partition(done):
            at = 0
            for rows in chain.from_iterable(whole.split(max_rows) for whole in target.rows):
                batch = rows.encode(token.bytes, sequence, self._topics.compression)
                built.batches.append(PartBatch(target.topic, target.partition, target.epoch, batch))
                built.message_indexes.append(target.message_indexes[at : at + len(rows)])
                at, sequence = at + len(rows), sequence + len(rows)
        return built

    def _build_one(self, message: Message, origin: bytes, sequence: int) -> BuiltBatches:
        """Build the batch of a single message, the usual case, at less cost."""
        name, _message, born_at, requested = self.items[0]
        partition, epoch = self._topics.locate(name, message.key, requested)
        batch = MessageRows((message,), (born_at,)).encode(
            origin, sequence, self._topics.compression
        )
        return BuiltBatches([PartBatch(name, partition, epoch, batch)], [(0,)])

    def _rows_by_partition(self, done: Collection[int]) -> Iterator[PartitionRows]:
        sorter = PartitionSorter(self._topics, done)
        index = 0
        for item in self.items:
            index += sorter.add(item, index)
        return sorter.close()


class PartitionSorter:
    """Sorts sends by partition.

    Messages of a topic without a key all go to one partition: each batch has its cost.
    Messages whose index is in `done` are left out.
    """

    def __init__(self, topics: TopicCache, done: Collection[int] = ()) -> None:
        self._topics, self._done = topics, done
        self._rows: dict[tuple[str, int], PartitionRows] = {}
        self._keyless: dict[str, int] = {}

    def add(self, item: BufferedSend, index: int) -> int:
        """Sort a send whose first message has this index; return its message count."""
        topic, content = self._topics.get(item.topic), item.content
        if isinstance(content, Message):
            if index in self._done:
                return 1
            partition = self._choose_partition(topic, content.key, item.requested_partition)
            self._rows_of(topic, partition).add(content, item.born_at, index)
            return 1
        for partition, chosen in self._topics.split_rows(
            topic, content, item.requested_partition
        ).items():
            left = [at for at in chosen if index + at not in self._done] if self._done else chosen
            if left:
                self._rows_of(topic, partition).add_columns(
                    content.select(left), [index + at for at in left]
                )
        return len(content)

    def close(self) -> Iterator[PartitionRows]:
        """Return the rows of each partition, in the order of their first messages."""
        for rows in self._rows.values():
            rows.close()
            yield rows

    def _rows_of(self, topic: TopicMetadata, partition: int) -> PartitionRows:
        return self._rows.setdefault(
            (topic.name, partition), PartitionRows(topic.name, partition, topic.epoch)
        )

    def _choose_partition(
        self, topic: TopicMetadata, key: str | None, requested: int | None
    ) -> int:
        if requested is not None or key or self._topics.has_partitioner:
            return self._topics.choose_partition(topic, key, requested)
        if topic.name not in self._keyless:
            self._keyless[topic.name] = self._topics.next_partition(topic)
        return self._keyless[topic.name]
