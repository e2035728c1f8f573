"""The entries of an outbox row: a transaction's messages, encoded by key.

The partitions of the topics need not be known: the broker chooses them by the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from uuid import UUID

from txmq.client.protocol.sender.rows import Rows
from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.transaction.buffer import BufferedSend, PartitionRows
from txmq.errors import BrokerUnavailable, MessageTooLarge
from txmq.model.measures import counted
from txmq.model.message import Message
from txmq.tx.outbox_entry import BYTES, MESSAGES, OutboxEntry, order_key

EntryKey = tuple[str, int | None, str | None]  # topic, requested partition, key


def outbox_entries(
    items: Iterable[BufferedSend], topics: TopicCache, token: UUID
) -> tuple[list[OutboxEntry], int]:
    """Return the entries, one or more for each key, and the number of their messages.

    Raises MessageTooLarge if they exceed a row, BrokerUnavailable if the client's
    partitioner needs a topic that is not cached.
    """
    entries: list[OutboxEntry] = []
    sequence = size = 0
    for entry_key, keyed in _rows_by_key(items, topics).items():
        for rows in chain.from_iterable(whole.split() for whole in keyed.rows):
            batch = rows.encode(token.bytes, sequence, topics.compression)
            entries.append(OutboxEntry(*entry_key, batch))
            sequence, size = sequence + len(rows), size + len(batch)
    if sequence > MESSAGES or size > BYTES:
        raise MessageTooLarge(
            f"A transaction of {counted(sequence, 'message')}, {size} bytes does not fit in the "
            f"outbox, which takes {MESSAGES} messages, {BYTES} bytes",
            hint="wait for the broker, or send less in one transaction",
        )
    return entries, sequence


def order_keys(items: Iterable[BufferedSend]) -> list[int]:
    """Return the keys of the messages, each as a hash of topic and key.

    Rows of the outbox carry them. Two transactions without a common one need no order.
    """
    keys = {
        (item.topic, key)
        for item in items
        for key in (
            (item.content.key,)
            if isinstance(item.content, Message)
            else item.content.row_keys() or ()
        )
        if key
    }
    return sorted({order_key(topic, key) for topic, key in keys})


def _rows_by_key(
    items: Iterable[BufferedSend], topics: TopicCache
) -> dict[EntryKey, PartitionRows]:
    by_key: dict[EntryKey, PartitionRows] = {}
    for item in items:
        for entry_key, content in _keyed_contents(item, topics):
            rows = by_key.setdefault(entry_key, PartitionRows(item.topic, 0, 0))
            if isinstance(content, Message):
                rows.add(content, item.born_at, 0)
            else:
                rows.add_columns(content, ())
    for rows in by_key.values():
        rows.close()
    return by_key


def _keyed_contents(
    item: BufferedSend, topics: TopicCache
) -> Iterator[tuple[EntryKey, Message | Rows]]:
    topic, content, _born_at, requested = item
    if isinstance(content, Message):
        yield _entry_key(topics, topic, requested, content.key), content
        return
    rows_of_key: dict[str | None, list[int]] = {}
    for row, key in enumerate(content.row_keys() or [None] * len(content)):
        rows_of_key.setdefault(key or None, []).append(row)
    for key, rows in rows_of_key.items():
        yield _entry_key(topics, topic, requested, key), content.select(rows)


def _entry_key(topics: TopicCache, topic: str, requested: int | None, key: str | None) -> EntryKey:
    if requested is None and topics.has_partitioner:
        metadata = topics.cached(topic)
        if metadata is None:
            raise BrokerUnavailable(
                f"The number of partitions of topic {topic!r}, which the partitioner needs, "
                "is unknown",
                hint="send to the topic once while the broker is there",
            )
        return topic, topics.choose_partition(metadata, key), None
    return topic, requested, key or None if requested is None else None
