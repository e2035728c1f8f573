"""The messages of a transaction as entries of an outbox row: encoded without knowing
how their topics are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from uuid import UUID

from txmq.client.protocol.sender.rows import Columns
from txmq.client.protocol.sender.topics import Topics
from txmq.client.protocol.transaction.buffer import Item, Lane
from txmq.errors import BrokerUnavailable, MessageTooLarge
from txmq.model.message import Message
from txmq.tx.outbox_entry import BYTES, MESSAGES, Entry

Way = tuple[str, int | None, str | None]  # topic, partition that was asked for, key


def entries_of(items: Iterable[Item], topics: Topics, token: UUID) -> tuple[list[Entry], int]:
    """The entries, one or more for each key, and how many messages they hold.

    Raises MessageTooLarge where they are more than a row takes, BrokerUnavailable where
    the client's partitioner would have to choose by a topic that is not known.
    """
    entries: list[Entry] = []
    sequence = size = 0
    for way, lane in _lanes(items, topics).items():
        for rows in chain.from_iterable(whole.pieces() for whole in lane.rows):
            batch = rows.encode(token.bytes, sequence, topics.compression)
            entries.append(Entry(*way, batch))
            sequence, size = sequence + len(rows), size + len(batch)
    if sequence > MESSAGES or size > BYTES:
        hint = f"the outbox takes {MESSAGES} messages, {BYTES} bytes at once: wait for the broker, or send less at once"
        raise MessageTooLarge(
            f"a transaction of {sequence} messages, {size} bytes, with its broker away", hint=hint
        )
    return entries, sequence


def _lanes(items: Iterable[Item], topics: Topics) -> dict[Way, Lane]:
    lanes: dict[Way, Lane] = {}
    for item in items:
        for way, content in _ways(item, topics):
            lane = lanes.setdefault(way, Lane(item.topic, 0, 0))
            if isinstance(content, Message):
                lane.add(content, item.born_at, 0)
            else:
                lane.add_columns(content, ())
    for lane in lanes.values():
        lane.close()
    return lanes


def _ways(item: Item, topics: Topics) -> Iterator[tuple[Way, Message | Columns]]:
    topic, content, _born_at, asked = item
    if isinstance(content, Message):
        yield _way(topics, topic, asked, content.key), content
        return
    places: dict[str | None, list[int]] = {}
    for place, key in enumerate(content.keys or [None] * len(content)):
        places.setdefault(key or None, []).append(place)
    for key, chosen in places.items():
        yield _way(topics, topic, asked, key), content.pick(chosen)


def _way(topics: Topics, topic: str, asked: int | None, key: str | None) -> Way:
    if asked is None and topics.asks_user:
        shape = topics.known(topic)
        if shape is None:
            hint = "the partitioner needs it: send to the topic once while the broker is there"
            raise BrokerUnavailable(
                f"how many partitions topic {topic} has is not known", hint=hint
            )
        return topic, topics.choose(shape, key), None
    return topic, asked, key or None if asked is None else None
