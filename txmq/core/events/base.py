"""Events: what the log holds. Each is the outcome of a decision, never an input to be
judged again.

Tuples inside an event come back from the log as plain tuples: `apply` never asks them
for an attribute.

An event's body in the log is the MessagePack array of its fields, in order, then its
attachment, if it has one (docs/FORMATS.md 4.1). Fields are appended with a default,
never removed; a number is never used again. Numbers 1..63 are topics, messages and
transactions, 64..127 consumers (`consumers.events`); those of transactions and jobs
stand in `transactions.events`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgpack


class Place(NamedTuple):
    """Where and when an event stands in the log."""

    position: int
    end: int  # position just after the record
    attachment: int  # position of the first byte of the attachment
    stored_at: int
    boot_epoch: int


Event = tuple[Any, ...]  # one of the NamedTuples registered below

EVENTS: dict[int, type[Event]] = {}
KINDS: dict[type[Event], int] = {}
E = TypeVar("E", bound=type[Event])


def event(kind: int) -> Callable[[E], E]:
    """Class decorator: give an event its number; two events of one number are an error
    at import.
    """

    def register(cls: E) -> E:
        if kind in EVENTS:
            raise ValueError(f"event number {kind} is taken by {EVENTS[kind].__name__}")
        EVENTS[kind] = cls
        KINDS[cls] = kind
        return cls

    return register


def encode(event: Event) -> bytes:
    """The head of an event's record: its fields as one MessagePack array."""
    return bytes(msgpack.packb(event))


def decode(kind: int, head: bytes | memoryview) -> Event:
    """The event of a record. Raises KeyError for a number this version does not
    know.
    """
    return EVENTS[kind](*msgpack.unpackb(head, use_list=False))


@event(1)
class Booted(NamedTuple):
    """The broker started: a new boot epoch; nobody is connected and nothing is leased
    any more.
    """

    boot_epoch: int
    broker: str


@event(2)
class TopicCreated(NamedTuple):
    """A topic came to be, declared or on first use."""

    topic_id: int
    name: str
    partitions: int


@event(3)
class TopicGrown(NamedTuple):
    """A topic has more partitions from now on; `epoch` counts its shapes from 1."""

    topic_id: int
    partitions: int
    epoch: int


@event(4)
class TopicDeleted(NamedTuple):
    """A topic was deleted; its id is never used again."""

    topic_id: int


@event(5)
class TopicAltered(NamedTuple):
    """A topic has other settings from now on, a `TopicSettings`."""

    topic_id: int
    settings: tuple[Any, ...]


@event(6)
class FirstsMoved(NamedTuple):
    """Retention: messages below these offsets, (partition, offset), are kept no longer.

    `passed` are the groups that had not processed all of them: (group id, partition,
    messages).
    """

    topic_id: int
    firsts: tuple[tuple[int, int], ...]
    passed: tuple[tuple[int, int, int], ...] = ()


@event(37)
class SnapshotNoted(NamedTuple):
    """A snapshot stands for `position`, and nothing has happened since: the next one
    needs a position of its own, and only below the older of two may segments go.
    """

    position: int


@event(7)
class MessagesCopied(NamedTuple):
    """Single messages out of batches that are kept no longer were copied. Attachment:
    batches of one row, joined.
    """

    lengths: tuple[int, ...]


@event(10)
class RowsRepointed(NamedTuple):
    """Rows of table `moved`, (group id, topic id, partition, offset, position, length),
    are found at a durable copy.

    `unpinned` are positions at which nothing is kept any more.
    """

    rows: tuple[tuple[int, int, int, int, int, int], ...]
    unpinned: tuple[int, ...] = ()


@event(8)
class BatchStored(NamedTuple):
    """A plain batch was published at once. Attachment: the batch."""

    topic_id: int
    partition: int
    base_offset: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    length: int
    tag_filter: int
    producer: bytes
    epoch: int
    sequence: int


@event(13)
class BatchesStored(NamedTuple):
    """Several plain batches, which came in one frame, were published at once:
    `BatchStored`s.

    Attachment: the batches of all, joined in their order.
    """

    batches: tuple[BatchStored, ...]


@event(9)
class BatchQueued(NamedTuple):
    """A plain batch met a held key: it is stored and waits for its turn. Attachment:
    the batch.

    Its ticket is its own position; `hashes` are its keys, which it holds from now on
    like a half message.
    """

    topic_id: int
    partition: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    length: int
    tag_filter: int
    producer: bytes
    epoch: int
    sequence: int
    hashes: tuple[int, ...]


class Delay(NamedTuple):
    """What is kept of a message until it is due; `carried` is its time or span of
    delivery, as the sender wrote it.
    """

    carried: int
    sequence: int
    key_hash: int | None


@event(26)
class InstanceRegistered(NamedTuple):
    """A process took the place of all earlier ones of its producer instance; `epoch`
    counts them from 1.
    """

    service: str
    instance: str
    epoch: int


@event(24)
class ProducerForgotten(NamedTuple):
    """Producers idle for too long are no longer remembered."""

    producers: tuple[bytes, ...]


@event(34)
class InstancesSeen(NamedTuple):
    """Processes of these producer instances (keys of table `instances`) are
    connected.
    """

    keys: tuple[bytes, ...]


@event(35)
class InstancesForgotten(NamedTuple):
    """Producer instances (keys of table `instances`) of which nobody was connected for
    too long are forgotten.
    """

    keys: tuple[bytes, ...]
