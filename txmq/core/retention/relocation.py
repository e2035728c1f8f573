"""Messages that outlive their batch, in table `moved`: retries, parked ones, letters.
They are copied, and found there.

    CopyOut ─► MessagesCopied ─► durable ─► Repoint ─► RowsRepointed

A copy has a pin (`pins`): its place is needed as long as the message is found there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers.failed_messages import Moved
from txmq.core.events.base import MessagesCopied, RowsRepointed
from txmq.core.state import log_pins
from txmq.core.state.state import Outcome
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Spot
    from txmq.core.state.state import State

COPIED_AT_ONCE = 64  # messages


class Outlived(NamedTuple):
    """A row of table `moved` whose batch is to go: where its message stands now."""

    group_id: int
    topic_id: int
    partition: int
    offset: int
    position: int
    length: int
    row: int


class CopyOut(NamedTuple):
    """Store batches of one row each; their places are known once that is applied."""

    batches: tuple[bytes, ...]


class Repoint(NamedTuple):
    """Let rows be found at copies that are durable: (row, position, length). `stale`
    are pins that may be gone.
    """

    rows: tuple[tuple[Outlived, int, int], ...]
    stale: tuple[int, ...] = ()


def moved_from(state: State, group_id: int, spot: Spot, start: int) -> Iterator[tuple[int, Moved]]:
    """The messages of a partition that left their place in a group, by their offsets,
    from one on.
    """
    low, high = (t.MOVED_KEY.pack(group_id, *spot, offset) for offset in (start, t.SIGN))
    rows: Any = state.tables[t.MOVED].range(low, high)
    for key, row in rows:
        yield t.MOVED_KEY.unpack(key)[3], Moved(*row)


def decide_copy(state: State, command: CopyOut, now: int) -> Outcome:
    del state, now
    return Outcome(
        (MessagesCopied(tuple(map(len, command.batches))),), None, b"".join(command.batches)
    )


def apply_copied(state: State, event: MessagesCopied, place: Place) -> None:
    """Nothing is to be found there until a record that comes after it says so."""


def decide_repoint(state: State, command: Repoint, now: int) -> Outcome:
    """What was acked, replayed or copied meanwhile is left as it is."""
    del now
    rows = tuple(
        (*outlived[:4], position, length)
        for outlived, position, length in command.rows
        if _position(state, outlived[:4]) == outlived.position
    )
    gone = tuple(
        pin.position
        for pin in (log_pins.at(state, at) for at in command.stale)
        if pin and is_stale(state, pin)
    )
    return Outcome((RowsRepointed(rows, gone),) if rows or gone else ())


def _position(state: State, key: tuple[int, int, int, int]) -> int | None:
    row: Any = state.tables[t.MOVED].get(t.MOVED_KEY.pack(*key))
    return None if row is None else Moved(*row).position


def is_stale(state: State, pin: log_pins.Pin) -> bool:
    """Whether what was pinned is gone, or elsewhere by now. Pins of batches go with
    their batches.
    """
    return pin.group_id != log_pins.ENTRY and _position(state, pin[1:]) != pin.position


def outlived(state: State, pin: log_pins.Pin) -> Outlived | None:
    """The message whose copy is pinned, to be copied once more."""
    row: Any = state.tables[t.MOVED].get(t.MOVED_KEY.pack(*pin[1:]))
    if pin.group_id == log_pins.ENTRY or row is None:
        return None
    found = Moved(*row)
    return Outlived(*pin[1:], found.position, found.length, found.row)


def apply_repointed(state: State, event: RowsRepointed, place: Place) -> None:
    """Only where a message is found changes: its indexes stay as they are."""
    del place
    for *spotted, position, length in event.rows:
        key = t.MOVED_KEY.pack(*spotted)
        row: Any = state.tables[t.MOVED].get(key)
        assert row is not None, "found there when it was decided"
        before = Moved(*row)
        log_pins.drop(state, before.position)
        state.tables[t.MOVED].put(
            key, tuple(before._replace(position=position, length=length, row=0))
        )
        log_pins.put(state, position, *spotted)
    for position in event.unpinned:
        log_pins.drop(state, position)


DECIDERS: dict[type, Any] = {CopyOut: decide_copy, Repoint: decide_repoint}
APPLIERS: dict[type, Any] = {MessagesCopied: apply_copied, RowsRepointed: apply_repointed}
