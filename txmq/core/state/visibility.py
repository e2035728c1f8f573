"""Visibility barriers: a large bundle is published in pieces and becomes visible as a
whole.

While the publication goes on, readers stop at a barrier in each of its partitions: the
first offset of the bundle there. Messages that are published beyond a barrier get their
offsets at once, and become visible later. One large bundle is published at a time. So
all barriers are lifted at once, with the record of the last piece. They no longer
matter once that record is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.state.state import VisibilityBarrier
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.state.state import State


def publishing_token(state: State) -> bytes | None:
    """Return the token of the large bundle that is being published."""
    return next((one.token for one in state.barriers.values() if not one.lifted_at), None)


def visible_end(state: State, topic_id: int, partition: int, durable: int | None = None) -> int:
    """Return the offset at which readers of a partition stop; 0 if its topic was
    deleted and has given up its partitions.

    `durable` is the end of the durable log; with None, lifted barriers do not count,
    durable or not.
    """
    barrier = state.barriers and state.barriers.get(TopicPartition(topic_id, partition))
    if not barrier or (barrier.lifted_at and (durable is None or barrier.lifted_at <= durable)):
        ends = state.topics_by_id[topic_id].end_offsets
        return ends[partition] if partition < len(ends) else 0
    return barrier.offset


def offset_at_time(state: State, topic_id: int, partition: int, time: int) -> int:
    """Return the first offset stored at or after `time`, or else the end. Times grow
    with offsets, so this bisects.
    """
    low = state.topics_by_id[topic_id].start_offsets[partition]
    high = visible_end(state, topic_id, partition)
    start = t.ENTRY_KEY.pack(topic_id, partition, 0)
    while low < high:
        middle = (low + high) // 2
        stop = t.ENTRY_KEY.pack(topic_id, partition, middle + 1)
        key, row = next(iter(state.entries.range(start, stop, reverse=True)))
        entry, base = t.BatchEntry._make(row), int(t.ENTRY_KEY.unpack(key)[2])
        if entry.stored_at < time:
            low = base + entry.count
        else:
            high = base
    return low


def is_blocked(state: State, tp: TopicPartition) -> bool:
    """Return whether a barrier of the partition is not lifted yet."""
    barrier = state.barriers.get(tp)
    return barrier is not None and not barrier.lifted_at


def all_passed(state: State, durable: int) -> bool:
    """Return whether the next large bundle may be published.

    Its barriers must not replace one that still stops a reader.
    """
    return all(one.lifted_at and one.lifted_at <= durable for one in state.barriers.values())


def put_up(state: State, token: bytes, offsets: Iterable[tuple[TopicPartition, int]]) -> None:
    """Apply: put up a barrier at each offset, unless the partition has an earlier one.
    Lifted barriers go.
    """
    drop_lifted(state)
    for tp, offset in offsets:
        if tp not in state.barriers:
            _put(state, tp, VisibilityBarrier(offset, token))


def extend(state: State, offsets: Iterable[tuple[TopicPartition, int]]) -> None:
    """Apply: hide a bundle that is published beyond a barrier. It becomes visible in
    all of its partitions when that barrier is lifted.
    """
    token = publishing_token(state)
    found = list(offsets)
    if token is None or not any(tp in state.barriers for tp, _offset in found):
        return
    for tp, offset in found:
        if tp not in state.barriers:
            _put(state, tp, VisibilityBarrier(offset, token))


def lift(state: State, position: int) -> None:
    """Apply: let readers pass once the log is durable up to `position`."""
    for tp, barrier in state.barriers.items():
        _put(state, tp, barrier._replace(lifted_at=position))
        state.topics_with_new_entries.add(tp.topic_id)


def drop_lifted(state: State) -> None:
    """Apply: forget the barriers whose lifting is durable."""
    for tp in [tp for tp, barrier in state.barriers.items() if barrier.lifted_at]:
        del state.barriers[tp]
        state.tables[t.BARRIERS].delete(t.PARTITION_KEY.pack(*tp))


def _put(state: State, tp: TopicPartition, barrier: VisibilityBarrier) -> None:
    state.barriers[tp] = barrier
    state.tables[t.BARRIERS].put(t.PARTITION_KEY.pack(*tp), barrier)
