"""Plain objects to table rows and back, so that the tables alone are the whole state at
one position of the log.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from txmq.core.state.state import RECEIPTS_KEPT, Producer, State, Topic, TopicSettings
from txmq.core.state.visibility import Gate
from txmq.core.transactions import undecided
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

BROKER_ROW = b"broker"
UPKEEP_ROW = b"upkeep"
TOPIC_KEY = t.TICKET_KEY
GROWTHS = 4  # place in a topic's row; older ones end there, or with it


def save(state: State) -> None:
    """Write what changed since the last call to the tables."""
    for topic_id in state.dirty_topics:
        topic = state.topics_by_id[topic_id]
        row = (topic.name, topic.epoch, topic.deleted, tuple(topic.ends), tuple(topic.growths))
        kept = (tuple(topic.settings), tuple(topic.firsts), tuple(topic.sizes))
        state.tables[t.TOPICS].put(TOPIC_KEY.pack(topic_id), row + kept)
    state.dirty_topics.clear()
    for name in state.dirty_producers:
        _save_producer(state, name)
    state.dirty_producers.clear()
    state.tables[t.META].put(
        BROKER_ROW, (state.boot_epoch, state.next_topic_id, state.stored_at, state.delayed)
    )
    upkeep = (state.swept, state.last_forgotten_epoch, state.lost_to, state.lost_before)
    state.tables[t.META].put(UPKEEP_ROW, upkeep)
    state.consumers.save(state.tables)


def _save_producer(state: State, name: bytes) -> None:
    producer = state.producers.get(name)
    if producer is None:
        state.tables[t.PRODUCERS].delete(name)
        return
    row = (producer.epoch, producer.last, producer.seen_at, tuple(producer.receipts))
    state.tables[t.PRODUCERS].put(name, row)


def load(tables: t.Tables) -> State:
    """The state that the tables hold."""
    state = State(tables)
    broker = tables[t.META].get(BROKER_ROW)
    if broker is None:
        return state
    state.boot_epoch, state.next_topic_id, state.stored_at, state.delayed = broker
    upkeep = tables[t.META].get(UPKEEP_ROW)
    if upkeep is not None:
        state.swept, state.last_forgotten_epoch, state.lost_to, state.lost_before = upkeep
    for key, row in _rows(tables, t.TOPICS):
        topic_id = TOPIC_KEY.unpack(key)[0]
        topic = topic_of(topic_id, row)
        state.topics_by_id[topic_id] = topic
        if not topic.deleted:
            state.topics[topic.name] = topic
    for name, row in _rows(tables, t.PRODUCERS):
        receipts = deque((tuple(receipt) for receipt in row[3]), maxlen=RECEIPTS_KEPT)
        state.producers[name] = Producer(row[0], row[1], row[2], receipts)
    for key, _row in _rows(tables, t.HOLDS):
        state.holds[t.HOLD_KEY.unpack(key)[:2]] += 1
    for key, row in _rows(tables, t.GATES):
        state.gates[t.PARTITION_KEY.unpack(key)] = Gate._make(row)
    state.backlog = sum(1 for _ in _rows(tables, t.BACKLOG))
    for token in undecided.tokens(state):
        undecided.count(state, token)
    for key, _row in _rows(tables, t.LISTED):
        state.listed[key[0]] += 1
    state.consumers.load(tables)
    return state


def _rows(tables: t.Tables, name: str) -> Iterator[tuple[bytes, Any]]:
    yield from tables[name].range(b"")


@lru_cache(maxsize=256)  # a hundred thousand topics have few different ones
def _settings(row: tuple[Any, ...]) -> TopicSettings:
    return TopicSettings(*row)


def topic_of(topic_id: int, row: Any) -> Topic:  # rows are untyped tuples
    growths, settings, firsts, sizes = (*row[GROWTHS:], (), (), (), ())[:4]
    topic = Topic(
        topic_id,
        row[0],
        list(row[3]),
        row[1],
        deleted=row[2],
        growths=[tuple(ends) for ends in growths],
    )
    topic.settings = _settings(settings)
    for numbers, stored in ((topic.firsts, firsts), (topic.sizes, sizes)):
        numbers[: len(stored)] = stored
    return topic
