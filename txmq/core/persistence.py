"""Conversion of the plain objects of the state to table rows and back.

After `save` the tables alone are the whole state at one position of the log.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from txmq.core.state import passed_letters
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
from txmq.model.cluster import LogList
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

BROKER_ROW = b"broker"
UPKEEP_ROW = b"upkeep"
RESTORES_ROW = b"restores"
LOST_SPANS_ROW = b"lost_spans"
BACKUP_ROW = b"backup"
LOGS_ROW = b"logs"
TOPIC_KEY = t.TICKET_KEY


def save(state: State) -> None:
    """Write the rows of what has changed since the last call."""
    for topic_id in state.dirty_topics:
        topic = state.topics_by_id[topic_id]
        row = (
            topic.name,
            topic.epoch,
            topic.deleted,
            tuple(topic.end_offsets),
            tuple(topic.ends_at_growth),
            tuple(topic.settings),
            tuple(topic.start_offsets),
            tuple(topic.partition_bytes),
            topic.made_at,
            tuple(topic.ends_at_restore),
        )
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
    if state.lost_spans:
        state.tables[t.META].put(LOST_SPANS_ROW, state.lost_spans)
    if state.restores:
        state.tables[t.META].put(RESTORES_ROW, state.restores)
    if state.backed_up_at:
        state.tables[t.META].put(BACKUP_ROW, (state.backed_up_at,))
    if state.logs.version:
        state.tables[t.META].put(LOGS_ROW, (state.logs.version, state.logs.rows))
    state.groups.save(state.tables)
    state.plans.save(state.tables)
    state.trials.save(state.tables)


def _save_producer(state: State, name: bytes) -> None:
    producer = state.producers.get(name)
    if producer is None:
        state.tables[t.PRODUCERS].delete(name)
        return
    row = (
        producer.epoch,
        producer.last,
        producer.seen_at,
        tuple(producer.receipts),
        producer.owner,
    )
    state.tables[t.PRODUCERS].put(name, row)


def load(tables: t.Tables) -> State:
    """Return the state that the tables hold."""
    state = State(tables)
    broker = tables[t.META].get(BROKER_ROW)
    if broker is None:
        return state
    state.boot_epoch, state.next_topic_id, state.stored_at, state.delayed_count = broker
    upkeep: Any = tables[t.META].get(UPKEEP_ROW)
    (
        state.expired_to,
        state.last_forgotten_epoch,
        state.lost_log_end,
        state.lost_before_time,
        state.doubted,
    ) = upkeep
    lost: Any = tables[t.META].get(LOST_SPANS_ROW)
    state.lost_spans = tuple((first, end) for first, end in lost or ())
    restored: Any = tables[t.META].get(RESTORES_ROW)
    state.restores = tuple(Restore(*row) for row in restored or ())
    backup: Any = tables[t.META].get(BACKUP_ROW)
    (state.backed_up_at,) = backup or (0,)
    listed: Any = tables[t.META].get(LOGS_ROW)
    if listed is not None:
        state.logs = LogList.of(*listed)
    for key, row in _rows(tables, t.TOPICS):
        topic_id = TOPIC_KEY.unpack(key)[0]
        topic = topic_from_row(topic_id, row)
        state.topics_by_id[topic_id] = topic
        if not topic.deleted:
            state.topics[topic.name] = topic
            state.partitions += topic.counted_partitions
            state.schema_characters += len(topic.settings.schema)
    for name, row in _rows(tables, t.PRODUCERS):
        epoch, last, seen_at, stored, owner = row
        receipts = deque((tuple(receipt) for receipt in stored), maxlen=MAX_RECEIPTS)
        state.producers[name] = ProducerState(epoch, last, seen_at, owner, receipts)
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
    passed_letters.load_queues(state)
    return state


def _rows(tables: t.Tables, name: str) -> Iterator[tuple[bytes, Any]]:
    yield from tables[name].range(b"")


@lru_cache(maxsize=256)  # a hundred thousand topics share a few settings
def _settings(row: tuple[Any, ...]) -> TopicSettings:
    return TopicSettings(*row)


def topic_from_row(topic_id: int, row: Any) -> Topic:  # noqa: ANN401  # rows are untyped
    """Return the topic of a row of table `topics`."""
    name, epoch, deleted, ends, ends_at_growth, settings, firsts, sizes, made_at, restores = row
    topic = Topic(
        topic_id,
        name,
        list(ends),
        epoch,
        deleted=deleted,
        ends_at_growth=[tuple(grown) for grown in ends_at_growth],
        settings=_settings(settings),
        made_at=made_at,
        ends_at_restore=[(restored, tuple(lost)) for restored, lost in restores],
    )
    for numbers, stored in ((topic.start_offsets, firsts), (topic.partition_bytes, sizes)):
        numbers[: len(stored)] = stored
    return topic
