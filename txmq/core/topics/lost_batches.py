"""Published batches that a repair of the log gave up.

Deliveries and retention go from entry to entry, so the offsets of a partition have no
gaps. An entry of length 0 stands for messages that are lost. Groups pass over it as
over messages that their members do not want; readers go on behind it.

A loss shows itself in two ways. The next batch of the partition begins behind the end
(`move_end`), or a snapshot from behind the loss still knows the batch (`give_up`).
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING

from txmq.core.state import log_pins
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State, Topic


def move_end(
    state: State, topic: Topic, partition: int, base: int, count: int, context: RecordContext
) -> None:
    """Apply: let a partition end behind `count` messages that are published at `base`.
    What is missing between its end and `base` was lost.
    """
    end = max(topic.end_offsets[partition], topic.start_offsets[partition])
    if base > end:
        state.entries.put(
            t.ENTRY_KEY.pack(topic.topic_id, partition, end),
            t.BatchEntry(context.position, 0, base - end, context.stored_at, 0, context.end),
        )
    topic.end_offsets[partition] = base + count


def is_given_up(state: State, position: int) -> bool:
    """Return whether the batch at a position was lost, though the tables know it."""
    spans = state.lost_spans
    if not spans:
        return False
    at = bisect_right(spans, position, key=itemgetter(0)) - 1
    return at >= 0 and position < spans[at][1]


def give_up(state: State, spans: Sequence[tuple[int, int]]) -> None:
    """Turn the entries of batches within `spans` (position, end) of the log into those
    of lost messages. Batches there that are not published yet will be lost, too.
    """
    state.lost_spans = tuple(sorted({*state.lost_spans, *spans}))
    lost = [
        (key, entry)
        for key, row in state.entries.range(b"")
        if is_given_up(state, (entry := t.BatchEntry._make(row)).position) and entry.length
    ]
    for key, entry in lost:
        topic_id, partition, _base = t.ENTRY_KEY.unpack(key)
        state.entries.put(key, entry._replace(length=0, tag_filter=0))
        topic = state.topics_by_id[topic_id]
        topic.partition_bytes[partition] -= entry.length
        state.dirty_topics.add(topic_id)
        log_pins.drop(state, entry.position)
