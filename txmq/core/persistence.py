"""Conversion of the plain objects of the state to table rows and back.

After `save` the tables alone are the whole state at one position of the log.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from txmq.core import upgrades
from txmq.core.state import failed_messages, passed_letters
from txmq.core.state.state import (
    MAX_RECEIPTS,
    ProducerState,
    Restore,
    State,
    Topic,
    TopicSettings,
    VisibilityBarrier,
)
from txmq.core.transactions import indexes
from txmq.core.upgrades import BROKER_ROW
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

UPKEEP_ROW = b"upkeep"
RESTORES_ROW = b"restores"
LOST_SPANS_ROW = b"lost_spans"
TOPIC_KEY = t.TICKET_KEY
FIRST_OPTIONAL_FIELD = 4  # of a topic's row: rows written before these fields end there
OPTIONAL_DEFAULTS: tuple[Any, ...] = ((), (), (), (), 0, ())


def save(state: State) -> None:
    """Write the rows of what has changed since the last call."""
    for topic_id in state.dirty_topics:
        topic = state.topics_by_id[topic_id]
        row: tuple[Any, ...] = (
            topic.name,
            topic.epoch,
            topic.deleted,
            tuple(topic.end_offsets),
            tuple(topic.ends_at_growth),
            tuple(topic.settings),
            tuple(topic.start_offsets),
            tuple(topic.partition_bytes),
            topic.made_at,
        )
        if topic.ends_at_restore:
            row = (*row, tuple(topic.ends_at_restore))
        state.tables[t.TOPICS].put(TOPIC_KEY.pack(topic_id), row)
    state.dirty_topics.clear()
    for name in state.dirty_producers:
        _save_producer(state, name)
    state.dirty_producers.clear()
    state.tables[t.META].put(
        BROKER_ROW,
        (state.boot_epoch, state.next_topic_id, state.stored_at, state.delayed_count),
    )
    state.tables[t.META].put(
        UPKEEP_ROW,
        (
            state.expired_to,
            state.last_forgotten_epoch,
            state.lost_log_end,
            state.lost_before_time,
            state.doubted,
        ),
    )
    upgrades.mark(state.tables)
    if state.lost_spans:
        state.tables[t.META].put(LOST_SPANS_ROW, state.lost_spans)
    if state.restores:
        state.tables[t.META].put(RESTORES_ROW, state.restores)
    state.groups.save(state.tables)
    state.plans.save(state.tables)
    state.trials.save(state.tables)


def _save_producer(state: State, name: bytes) -> None:
    producer = state.producers.get(name)
    if producer is None:
        state.tables[t.PRODUCERS].delete(name)
        return
    row: tuple[object, ...] = (
        producer.epoch,
        producer.last,
        producer.seen_at,
        tuple(producer.receipts),
    )
    if producer.owner:
        row = (*row, producer.owner)
    state.tables[t.PRODUCERS].put(name, row)


def load(tables: t.Tables) -> State:
    """Return the state that the tables hold. Those of an older version are upgraded."""
    for _step in upgrades.upgrade(tables):
        pass
    state = State(tables)
    broker = tables[t.META].get(BROKER_ROW)
    if broker is None:
        return state
    state.boot_epoch, state.next_topic_id, state.stored_at, state.delayed_count = broker
    upkeep = tables[t.META].get(UPKEEP_ROW)
    if upkeep is not None:
        state.expired_to, state.last_forgotten_epoch, *later = upkeep
        # rows of older versions end before the last field
        state.lost_log_end, state.lost_before_time, state.doubted = (*later, 0)[:3]
    lost: Any = tables[t.META].get(LOST_SPANS_ROW)
    state.lost_spans = tuple((first, end) for first, end in lost or ())
    restored: Any = tables[t.META].get(RESTORES_ROW)
    state.restores = tuple(Restore(*row) for row in restored or ())
    for key, row in _rows(tables, t.TOPICS):
        topic_id = TOPIC_KEY.unpack(key)[0]
        topic = topic_from_row(topic_id, row)
        state.topics_by_id[topic_id] = topic
        if not topic.deleted:
            state.topics[topic.name] = topic
            state.partitions += topic.counted_partitions
            state.schema_characters += len(topic.settings.schema)
    for name, row in _rows(tables, t.PRODUCERS):
        receipts = deque((tuple(receipt) for receipt in row[3]), maxlen=MAX_RECEIPTS)
        owner = row[4] if len(row) > 4 else ""
        state.producers[name] = ProducerState(row[0], row[1], row[2], owner, receipts)
    for key, _row in _rows(tables, t.HOLDS):
        topic_id, partition, _key_hash, _ticket = t.HOLD_KEY.unpack(key)
        state.held_keys[TopicPartition(topic_id, partition)] += 1
    for key, row in _rows(tables, t.BARRIERS):
        tp = TopicPartition._make(t.PARTITION_KEY.unpack(key))
        state.barriers[tp] = VisibilityBarrier._make(row)
    state.backlog = sum(1 for _ in _rows(tables, t.BACKLOG))
    indexes.count_all_undecided(state)
    for key, _row in _rows(tables, t.LISTED):
        state.listed[key[0]] += 1
    state.groups.load(tables)
    state.plans.load(tables)
    state.users.load(tables)
    state.trials.load(tables)
    failed_messages.count_exported(state)
    passed_letters.load_queues(state)
    return state


def _rows(tables: t.Tables, name: str) -> Iterator[tuple[bytes, Any]]:
    yield from tables[name].range(b"")


@lru_cache(maxsize=256)  # a hundred thousand topics share a few settings
def _settings(row: tuple[Any, ...]) -> TopicSettings:
    return TopicSettings(*row)


def topic_from_row(topic_id: int, row: Any) -> Topic:  # noqa: ANN401  # rows are untyped
    """Return the topic of a row of table `topics`."""
    optional: tuple[Any, ...] = row[FIRST_OPTIONAL_FIELD:]
    ends_at_growth, settings, firsts, sizes, made_at, ends_at_restore = (
        *optional,
        *OPTIONAL_DEFAULTS[len(optional) :],
    )
    topic = Topic(
        topic_id,
        row[0],
        list(row[3]),
        row[1],
        deleted=row[2],
        ends_at_growth=[tuple(ends) for ends in ends_at_growth],
        settings=_settings(settings),
        made_at=made_at,
        ends_at_restore=[(epoch, tuple(ends)) for epoch, ends in ends_at_restore],
    )
    for numbers, stored in ((topic.start_offsets, firsts), (topic.partition_bytes, sizes)):
        numbers[: len(stored)] = stored
    return topic
