"""The log floor: the lowest positions of the log that the state still refers to."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from txmq.core.state import log_pins
from txmq.core.topics import delayed, key_order
from txmq.core.transactions import indexes
from txmq.core.transactions.model import every_batch, get
from txmq.model.own_topics import is_own
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State, Topic

# waiting bundles and queued batches to examine; with more, the floor is 0 for now
MAX_SCANNED = 10_000


def topic_floor(state: State, topic: Topic) -> int:
    """Return a lower bound of the positions of a topic's published batches, without
    pinned ones.

    Each message of the broker's own topics has a pin, and can be copied.
    """
    lowest = t.SIGN
    own = is_own(topic.name)
    for partition, first in enumerate(topic.start_offsets):
        row = state.entries.get(t.ENTRY_KEY.pack(topic.topic_id, partition, first))
        if row is not None:
            entry = t.BatchEntry._make(row)
            if own and log_pins.get(state, entry.position) is not None:
                continue
            lowest = min(lowest, entry.position, max(0, entry.visible_at - log_pins.SLACK_BYTES))
    return lowest


def state_floor(state: State, *, delayed_too: bool = True) -> int:
    """Return the lowest position of batches that are neither published nor pinned.

    Without `delayed_too`, delayed messages do not count: they can be copied.
    """
    floors = (
        position
        for source in SOURCES
        if delayed_too or source is not _delayed
        for position in source(state)
    )
    return min(floors, default=t.SIGN)


def _undecided(state: State) -> Iterator[int]:
    for key, _row in islice(state.tables[t.UNDECIDED].range(b""), 1):
        yield t.TICKET_KEY.unpack(key)[0]


def _queued(state: State) -> Iterator[int]:
    # Messages that were delayed before lie far below their tickets.
    rows = islice(state.tables[t.QUEUED].range(b""), MAX_SCANNED + 1)
    for scanned, (_key, row) in enumerate(rows):
        yield key_order.unplaced_batch(row).position if scanned < MAX_SCANNED else 0


def _delayed(state: State) -> Iterator[int]:
    lowest = delayed.lowest_position(state)
    if lowest is not None:
        yield lowest


def _waiting(state: State) -> Iterator[int]:
    # Committed bundles that wait for earlier tickets. Their own tickets do not bound
    # their positions: some get one with their decision.
    if state.listed[indexes.ListKind.WAITING] > MAX_SCANNED:
        yield 0
        return
    for token in indexes.listed_tokens(state, indexes.ListKind.WAITING):
        row = get(state, token)
        if row is not None:
            yield from (
                batch.position for batch, _offset in islice(every_batch(state, token, row), 1)
            )


# Every table with positions of the log needs an entry here (or log pins): otherwise
# retention removes the segments that it refers to.
SOURCES = (_undecided, _queued, _waiting, _delayed)
