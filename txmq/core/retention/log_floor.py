"""From where on the log is still needed: the lowest positions that the state may have
to read at.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from txmq.core.state import log_pins
from txmq.core.topics import delayed, key_order
from txmq.core.transactions import listed
from txmq.core.transactions.model import every_batch, get
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State, Topic

# committed transactions that wait; where there are more, nothing is freed for the
# moment
WAITING_LOOKED_AT = 10_000


def by_topic(state: State, topic: Topic) -> int:
    """The lowest position that a published batch of a topic may stand at, pinned ones
    aside.
    """
    lowest = t.SIGN
    for partition, first in enumerate(topic.firsts):
        row = state.entries.get(t.ENTRY_KEY.pack(topic.topic_id, partition, first))
        if row is not None:
            entry = t.Entry._make(row)
            lowest = min(lowest, entry.position, max(0, entry.visible_at - log_pins.SLACK))
    return lowest


def besides(state: State, *, delayed_too: bool = True) -> int:
    """The lowest position that something other than published batches and copies of
    messages may stand at; without delayed messages, which can be stored again, if they
    are not counted.
    """
    found = (
        position
        for needed in NEEDED
        if delayed_too or needed is not _delayed
        for position in needed(state)
    )
    return min(found, default=t.SIGN)


def _undecided(state: State) -> Iterator[int]:
    for key, _row in islice(state.tables[t.UNDECIDED].range(b""), 1):
        yield t.TICKET_KEY.unpack(key)[0]


def _queued(state: State) -> Iterator[int]:
    """Of batches that wait for a key: those that were delayed before that stand far
    below their tickets.
    """
    for looked, (_key, row) in enumerate(
        islice(state.tables[t.QUEUED].range(b""), WAITING_LOOKED_AT + 1)
    ):
        yield key_order.held(row).position if looked < WAITING_LOOKED_AT else 0


def _delayed(state: State) -> Iterator[int]:
    lowest = delayed.lowest_place(state)
    if lowest is not None:
        yield lowest


def _waiting(state: State) -> Iterator[int]:
    """Of transactions that are committed and wait: their tickets may be those of their
    decisions.
    """
    if state.listed[listed.Kind.WAITING] > WAITING_LOOKED_AT:
        yield 0
        return
    for token in listed.tokens(state, listed.Kind.WAITING):
        row = get(state, token)
        if row is not None:
            yield from (
                batch.position for batch, _offset in islice(every_batch(state, token, row), 1)
            )


# Whoever keeps positions of the log in a table of its own has a line here, or retention
# takes what is there.
NEEDED = (_undecided, _queued, _waiting, _delayed)
