"""The content of an outbox row, and the group it becomes."""

from __future__ import annotations

from uuid import UUID

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.batch import verify
from txmq.client.protocol.sender.rows import ColumnRows, column_rows
from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.outbox_entries import outbox_entries
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import RemoteProtocolError
from txmq.model.message import Message
from txmq.tx.outbox_entry import (
    OutboxEntry,
    TopicPartitions,
    outbox_part,
    pack_entries,
    unpack_entries,
)
from txmq.wire.bundle import pack_part, unpack_part

TOKEN = UUID(int=0x0123456789ABCDEF)
TOPICS = TopicCache(lambda _topic, _within: {}, None)
keys = st.none() | st.text(min_size=1, max_size=5)
names = st.sampled_from(["orders", "invoices"])


def group_in(entries: list[OutboxEntry], partitions: int = 8) -> list[tuple[str, int, int]]:
    """Topic, partition and size of each batch of the group, as the broker reads it."""
    part = outbox_part(TOKEN, "shop", entries, lambda _topic: TopicPartitions(partitions, 3))
    read = unpack_part(b"".join(pack_part(part)))
    assert (read.token, read.sealed, read.commit) == (TOKEN.bytes, True, True)
    assert {batch.topic_epoch for batch in read.batches} <= {3}
    return [(batch.topic, batch.partition, verify(batch.batch).count) for batch in read.batches]


@given(st.lists(st.tuples(names, keys, st.none() | st.integers(0, 7)), min_size=1, max_size=30))
def test_what_was_sent_is_what_the_row_holds_and_keys_stay_together(
    sent: list[tuple[str, str | None, int | None]],
) -> None:
    buffer = Buffer(TOPICS)
    for topic, key, partition in sent:
        buffer.add(topic, Message(b"body", key), 1, partition)
    entries, count = outbox_entries(buffer.items, TOPICS, new_token())
    assert count == len(sent)
    assert unpack_entries(pack_entries(entries), TOKEN) == entries
    groups = group_in(entries)
    assert sum(size for _topic, _partition, size in groups) == len(sent)
    ways = {
        (topic, partition, None if partition is not None else key) for topic, key, partition in sent
    }
    assert {(entry.topic, entry.partition, entry.key) for entry in entries} == ways


def test_columns_are_kept_by_key() -> None:
    buffer = Buffer(TOPICS)
    buffer.add_columns("orders", _columns(["a", None, "b", "a"]), None)
    entries, count = outbox_entries(buffer.items, TOPICS, TOKEN)
    assert count == 4
    assert {entry.key: verify(entry.batch).count for entry in entries} == {"a": 2, None: 1, "b": 1}


def _columns(keys: list[str | None]) -> ColumnRows:
    return column_rows([b"x"] * len(keys), keys, None, 1)


def test_a_message_without_a_key_goes_the_same_way_each_time() -> None:
    entry = OutboxEntry("orders", None, None, b"")
    first, again = (
        outbox_part(TOKEN, "", [entry], lambda _topic: TopicPartitions(8, 1)) for _ in range(2)
    )
    assert first == again


@pytest.mark.parametrize(
    "content",
    [
        b"x",
        b"{",
        b"{}",
        b'{"topic": "t", "key": null, "body": "?", "headers": {}, "born_at": "now"}',
        msgpack.packb(7),
        msgpack.packb([["orders", None, None]]),
        msgpack.packb([["orders", -1, None, b""]]),
        msgpack.packb([[7, None, None, b""]]),
        msgpack.packb([["orders", None, 7, b""]]),
        msgpack.packb([["orders", None, None, "text"]]),
    ],
)
def test_a_damaged_row_is_refused(content: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="outbox"):
        unpack_entries(content, TOKEN)
