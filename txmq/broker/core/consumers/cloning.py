"""A clone that is still being made: what its group has moved is looked through a slice at a time (`clones`).

The clone stands for the moment in which it was begun. Its group goes on meanwhile; so what waits for another delivery
there, and is done with before its slice comes, is taken in as it goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.core import tables as t
from txmq.broker.core.consumers.positions import FIRST

if TYPE_CHECKING:
    from txmq.broker.core.consumers.consumers import Group, Spotted
    from txmq.broker.core.state import State


class Cloning(NamedTuple):
    """The group that it is made from, by its number, and from which message on that one's rows are yet to come."""

    source: int
    start: tuple[int, int, int] = (0, 0, 0)


def take_in(state: State, clone: Group, spotted: Spotted) -> None:
    """Apply: the message is to be delivered in the clone, too. What came later than the clone is in front of it."""
    topic_id, partition, offset = spotted
    spot = (topic_id, partition)
    position = clone.positions.get(spot)
    if position is None or offset >= position.cursor:
        return
    position = state.consumers.touch(clone, spot)
    if offset >= position.floor:
        position.settled.cut(offset, offset + 1)
        position.redeliver.put(offset, offset + 1, FIRST)
    else:
        _missed(state, clone, spotted)


def _missed(state: State, clone: Group, spotted: Spotted) -> None:
    """Retention has gone on meanwhile: counted as what any other group has missed."""
    key = t.POSITION_KEY.pack(clone.group_id, *spotted[:2])
    row = state.tables[t.PASSED].get(key)
    state.tables[t.PASSED].put(key, (1 + (row[0] if row else 0), state.stored_at))


def keep(state: State, source: Group, spotted: Spotted) -> None:
    """Apply: a message that waits for another delivery leaves its row; clones may yet have to come to it."""
    for number in source.clones:
        clone = state.consumers.by_id[number]
        if clone.cloning is not None and spotted >= clone.cloning.start:
            take_in(state, clone, spotted)
