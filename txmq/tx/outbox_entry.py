"""What waits in a database for a broker that was away: the content of an outbox row
(docs/FORMATS.md 6).

The messages were encoded by their producer, one batch for those that go the same way
whatever the shape of their topic: of one key, or without a key, or for a partition that
was named. Which partition the others go to is settled when the broker is there to tell
the topic's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

import msgpack

from txmq.errors import RemoteProtocolError
from txmq.model.keys import partition_of
from txmq.wire.group import NO_DIGEST, Description, Part, PartBatch, group_digest

BYTES: Final = 8 << 20  # of one transaction's batches,
MESSAGES: Final = 4_096  # and how many messages they hold: what one part of a group carries
STAYS: Final = "it stays where it is: see `txmq outbox show` and `txmq outbox drop`"


class Entry(NamedTuple):
    """A batch and where it goes: to the partition that was asked for, or by the key
    that all its messages have.
    """

    topic: str
    partition: int | None
    key: str | None
    batch: bytes


class Shape(NamedTuple):
    """What is to be known of a topic: how many partitions it has, and which of its
    shapes that is.
    """

    partitions: int
    epoch: int


def pack(entries: Sequence[Entry]) -> bytes:
    """The content of a row."""
    return bytes(msgpack.packb(entries))


def unpack(content: bytes) -> list[Entry]:
    """The entries of a row. Raises RemoteProtocolError where it holds something
    else.
    """
    try:
        entries = [Entry(*fields) for fields in msgpack.unpackb(content, max_ext_len=0)]
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError(f"a damaged row of the outbox: {error}", hint=STAYS) from error
    if not all(map(_is_entry, entries)):
        raise RemoteProtocolError("a row of the outbox with other fields", hint=STAYS)
    return entries


def group_of(
    token: UUID, service: str, entries: Sequence[Entry], shape: Callable[[str], Shape]
) -> Part:
    """The group of a row, in the one part that it fits in. `shape` may raise, where a
    topic cannot be had.

    It is decided as it is stored: its transaction has committed, or the row would not
    be there.
    """
    batches = tuple(_placed(token, entry, shape(entry.topic)) for entry in entries)
    part = Part(token.bytes, 0, 0, True, True, NO_DIGEST, Description(("local",), service), batches)
    return part._replace(digest=group_digest([part]))


def _placed(token: UUID, entry: Entry, shape: Shape) -> PartBatch:
    if entry.partition is not None:
        partition = entry.partition
    elif entry.key:
        partition = partition_of(entry.key, shape.partitions)
    else:  # any will do, but each time the same
        partition = token.int % shape.partitions
    return PartBatch(entry.topic, partition, shape.epoch, entry.batch)


def _is_entry(entry: Entry) -> bool:
    topic, partition, key, batch = entry
    asked = partition is None or (type(partition) is int and 0 <= partition < 1 << 32)
    return (
        asked and type(topic) is str and type(batch) is bytes and (key is None or type(key) is str)
    )
