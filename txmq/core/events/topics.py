"""Events of topics, plain sends and retention."""

from __future__ import annotations

from typing import Any, NamedTuple

from txmq.core.events.base import event


@event(2)
class TopicCreated(NamedTuple):
    """A topic was created, by a call or on first use. `epoch` is its first one: later
    than any of a deleted topic of its name.
    """

    topic_id: int
    name: str
    partitions: int
    epoch: int


@event(3)
class TopicGrown(NamedTuple):
    """Partitions were added to a topic; `epoch` counts its shapes from 1."""

    topic_id: int
    partitions: int
    epoch: int


@event(4)
class TopicDeleted(NamedTuple):
    """A topic was deleted; its id is never used again."""

    topic_id: int


@event(110)
class TopicsEmptied(NamedTuple):
    """Deleted topics whose messages are all gone gave up what they had for each
    partition. Their names stay.
    """

    topic_ids: tuple[int, ...]


@event(5)
class TopicAltered(NamedTuple):
    """The settings of a topic changed; `settings` is a `TopicSettings`."""

    topic_id: int
    settings: tuple[Any, ...]


@event(122)
class SequencesSkipped(NamedTuple):
    """A producer's session continues after the sequence `last`. What is missing before
    will never come.
    """

    producer: bytes
    epoch: int
    last: int


@event(8)
class BatchStored(NamedTuple):
    """A plain batch was published. Attachment: the batch."""

    topic_id: int
    partition: int
    base_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    length: int
    tag_filter: int
    producer: bytes
    epoch: int
    sequence: int


@event(13)
class BatchesStored(NamedTuple):
    """Several plain batches of one request were published, each a `BatchStored`.

    Attachment: the batches, joined in their order.
    """

    batches: tuple[BatchStored, ...]


@event(9)
class BatchQueued(NamedTuple):
    """A plain batch met a held key: it is stored and waits for its turn.

    Its ticket is the position of this record. `hashes` are its keys, which the ticket
    holds like that of a half message. Attachment: the batch.
    """

    topic_id: int
    partition: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    length: int
    tag_filter: int
    producer: bytes
    epoch: int
    sequence: int
    hashes: tuple[int, ...]


@event(24)
class ProducerForgotten(NamedTuple):
    """Producers were forgotten, because they were idle for too long."""

    producers: tuple[bytes, ...]


@event(6)
class FirstsMoved(NamedTuple):
    """Retention raised the start offsets of a topic: (partition, offset).

    `passed` are the groups that have missed messages by that: (group id, partition,
    number of messages).
    """

    topic_id: int
    firsts: tuple[tuple[int, int], ...]
    passed: tuple[tuple[int, int, int], ...]


@event(7)
class MessagesCopied(NamedTuple):
    """Failed messages of expiring batches were copied. Attachment: a batch of one row
    for each, joined.
    """

    lengths: tuple[int, ...]


@event(10)
class RowsRepointed(NamedTuple):
    """Failed messages point at durable copies from now on: (group id, topic id,
    partition, offset, position, length).

    `unpinned` are positions whose log pins are removed. `versions` of edited messages
    have a new position, too; (…, former position, position, length).
    """

    rows: tuple[tuple[int, int, int, int, int, int], ...]
    unpinned: tuple[int, ...]
    versions: tuple[tuple[int, int, int, int, int, int, int], ...]
