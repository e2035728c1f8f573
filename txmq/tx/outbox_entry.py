"""The content of an outbox row in a business database (docs/FORMATS.md 6).

A row holds the messages of a transaction for a broker that was away. Their producer
encoded them: one batch for the messages of one key, or without a key, or for a named
partition, whatever the number of partitions of their topic. The partition of the others
is chosen once the broker is there and says how many partitions the topic has.

A row that the SQL function `txmq.send` has written has one message, as JSON: the
database cannot encode batches.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final, NamedTuple
from uuid import UUID

import msgpack

from txmq.batch import encode_one
from txmq.errors import RemoteProtocolError, TxmqError
from txmq.model.decider import ByBroker
from txmq.model.keys import partition_of
from txmq.model.message import Message
from txmq.wire.bundle import NO_DIGEST, BundleDescription, BundlePart, PartBatch, bundle_digest

# The limits of one transaction: what one part of a bundle carries.
BYTES: Final = 8 << 20
MESSAGES: Final = 4_096
BY_SQL: Final = b"{"  # the first byte of a row by `txmq.send`; no MessagePack array's
STAYS: Final = "it stays where it is: see `txmq outbox show` and `txmq outbox drop`"


class OutboxEntry(NamedTuple):
    """A batch, and its destination: a named partition, or the one of the key of all
    its messages.
    """

    topic: str
    partition: int | None
    key: str | None
    batch: bytes


class TopicPartitions(NamedTuple):
    """The number of partitions of a topic; `epoch` counts its changes."""

    partitions: int
    epoch: int


def order_key(topic: str, key: str) -> int:
    """Return the hash of a topic and a key that rows carry: those with a common one are
    published in their order. PostgreSQL computes the same for `txmq.send`.
    """
    digest = sha256(f"{topic}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


def pack_entries(entries: Sequence[OutboxEntry]) -> bytes:
    """Return the content of a row."""
    return bytes(msgpack.packb(entries))


def unpack_entries(content: bytes, token: UUID) -> list[OutboxEntry]:
    """Return the entries of a row, whose token this is. Raises RemoteProtocolError."""
    if content.startswith(BY_SQL):
        return [_entry_by_sql(content, token)]
    try:
        entries = [OutboxEntry(*fields) for fields in msgpack.unpackb(content, max_ext_len=0)]
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError(f"a row of the outbox is damaged: {error}", hint=STAYS) from error
    if not all(map(_is_entry, entries)):
        raise RemoteProtocolError("a row of the outbox has other fields", hint=STAYS)
    return entries


def _entry_by_sql(content: bytes, token: UUID) -> OutboxEntry:
    """Return the entry of a row that `txmq.send` of the database has written."""
    try:
        row = json.loads(content)
        topic, key, body = str(row["topic"]), row["key"], b64decode(row["body"])
        batch = encode_one(
            Message(body, key=key, headers=row["headers"]),
            producer_id=token.bytes,
            epoch=0,
            sequence=0,
            born_at=row["born_at"],
        )
    except (KeyError, TypeError, ValueError, TxmqError) as error:
        raise RemoteProtocolError(f"a row of the outbox is damaged: {error}", hint=STAYS) from error
    return OutboxEntry(topic, None, key, batch)


def outbox_part(
    token: UUID,
    service: str,
    entries: Sequence[OutboxEntry],
    shape: Callable[[str], TopicPartitions],
) -> BundlePart:
    """Return the bundle of a row, in one part. `shape` may raise for a topic.

    The bundle is committed as it is stored: its transaction has committed, or the row
    would not be there.
    """
    batches = tuple(_placed(token, entry, shape(entry.topic)) for entry in entries)
    part = BundlePart(
        token.bytes, 0, 0, True, True, NO_DIGEST, BundleDescription(ByBroker(), service), batches
    )
    return part._replace(digest=bundle_digest([part]))


def _placed(token: UUID, entry: OutboxEntry, shape: TopicPartitions) -> PartBatch:
    if entry.partition is not None:
        partition = entry.partition
    elif entry.key:
        partition = partition_of(entry.key, shape.partitions)
    else:  # any partition, but the same one in each attempt
        partition = token.int % shape.partitions
    return PartBatch(entry.topic, partition, shape.epoch, entry.batch)


def _is_entry(entry: OutboxEntry) -> bool:
    topic, partition, key, batch = entry
    asked = partition is None or (type(partition) is int and 0 <= partition < 1 << 32)
    return (
        asked and type(topic) is str and type(batch) is bytes and (key is None or type(key) is str)
    )
