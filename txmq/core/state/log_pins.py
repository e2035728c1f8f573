"""Pins: what is kept at a place in the log that the oldest batches of the partitions do
not account for.

The batches of a partition stand in the log in the order of their offsets, but for those
of a transaction: they may have been stored long before they were published. One that
was stored more than `SLACK` before gets a pin, and so does the copy of a message that
outlived its batch. A pin is a row of table `pins` by position; what it stands for may
be gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State

SLACK = 4 << 20  # bytes of log; a transaction that is decided at once needs no pin
ENTRY = 0  # in place of a group's id: the pin of a published batch


class Pin(NamedTuple):
    """At `position`: a published batch, or the copy of a message that the group has in
    table `moved`.
    """

    position: int
    group_id: int
    topic_id: int
    partition: int
    offset: int


def put(
    state: State, position: int, group_id: int, topic_id: int, partition: int, offset: int
) -> None:
    """Apply: something is kept at this position."""
    state.tables[t.PINS].put(t.PIN_KEY.pack(position), (group_id, topic_id, partition, offset))


def drop(state: State, position: int) -> None:
    """Apply: nothing is; fine where nothing was."""
    state.tables[t.PINS].delete(t.PIN_KEY.pack(position))


def at(state: State, position: int) -> Pin | None:
    """What is pinned there, if anything."""
    row: Any = state.tables[t.PINS].get(t.PIN_KEY.pack(position))
    return None if row is None else Pin(position, *row)


def below(state: State, position: int) -> Iterator[Pin]:
    """All pins below a position, the lowest first."""
    for key, row in state.tables[t.PINS].range(b"", t.PIN_KEY.pack(position)):
        yield Pin(t.PIN_KEY.unpack(key)[0], *row)
