"""A clone that is still being made: what its group has moved is looked through a slice
at a time (`clones`).

The clone stands for the moment in which it was begun. Its group goes on meanwhile; so
what waits for another delivery there, and is done with before its slice comes, is taken
in as it goes. Retention waits at the clone's floor: it could not tell what the clone
has missed before all is taken in, and one message may be taken in more than once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.state.positions import FIRST

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import Group, Spotted
    from txmq.core.state.state import State


class Cloning(NamedTuple):
    """The group that it is made from, by its number, and from which message on that
    one's rows are yet to come.
    """

    source: int
    start: tuple[int, int, int] = (0, 0, 0)


def take_in(state: State, clone: Group, spotted: Spotted) -> None:
    """Apply: the message is to be delivered in the clone, too. What came later than the
    clone is in front of it.

    Below the clone's floor are dead letters that retention had passed before, replayed
    since: none of the clone's.
    """
    topic_id, partition, offset = spotted
    spot = (topic_id, partition)
    position = clone.positions.get(spot)
    if position is None or not position.floor <= offset < position.cursor:
        return
    position = state.consumers.touch(clone, spot)
    position.settled.cut(offset, offset + 1)
    position.redeliver.put(offset, offset + 1, FIRST)


def keep(state: State, source: Group, spotted: Spotted) -> None:
    """Apply: a message that waits for another delivery leaves its row; clones may yet
    have to come to it.
    """
    for number in source.clones:
        clone = state.consumers.by_id[number]
        if clone.cloning is not None and spotted >= clone.cloning.start:
            take_in(state, clone, spotted)
