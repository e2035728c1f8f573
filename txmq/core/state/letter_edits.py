"""The edits of a failed message: what it was, and each version since.

Table `edits` has a row for each version of a message that was edited, from number 0,
the original, on. Each version is a batch of one row in the log, with a log pin; that of
a reverting edit is the original. They end with the row of the message in table
`failed`, which points at the newest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state import log_pins
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State

ORIGINAL = 0  # number of the version that was published
FailedRef = tuple[int, int, int, int]  # group id, topic id, partition, offset


class LetterVersion(NamedTuple):
    """A version of a message, and who made it; of the original only where it is."""

    position: int
    length: int
    at: int = 0
    by: str = ""
    reason: str = ""
    reverts: bool = False  # it is the original again


def versions(state: State, ref: FailedRef) -> Iterator[tuple[int, LetterVersion]]:
    """Yield number and version of a message, the original first; nothing for one that
    was not edited.
    """
    start, stop = (t.EDIT_KEY.pack(*ref, number) for number in (0, t.MAX_EDIT))
    rows: Any = state.tables[t.EDITS].range(start, stop)
    for key, row in rows:
        yield t.EDIT_KEY.unpack(key)[4], LetterVersion(*row)


def version(state: State, ref: FailedRef, number: int) -> LetterVersion | None:
    """Return one version of a message."""
    row: Any = state.tables[t.EDITS].get(t.EDIT_KEY.pack(*ref, number))
    return None if row is None else LetterVersion(*row)


def put(state: State, ref: FailedRef, number: int, one: LetterVersion) -> None:
    """Apply: set a version, and pin its batch."""
    state.tables[t.EDITS].put(t.EDIT_KEY.pack(*ref, number), tuple(one))
    log_pins.put(state, one.position, *ref)


def forget(state: State, ref: FailedRef) -> None:
    """Apply: the row of the message is removed for good."""
    for number, one in list(versions(state, ref)):
        state.tables[t.EDITS].delete(t.EDIT_KEY.pack(*ref, number))
        log_pins.drop(state, one.position)


def at_position(state: State, ref: FailedRef, position: int) -> LetterVersion | None:
    """Return the version whose batch is at a position of the log."""
    return next((one for _number, one in versions(state, ref) if one.position == position), None)


def repoint(state: State, ref: FailedRef, before: int, position: int, length: int) -> None:
    """Apply: the versions at the position `before` have a copy elsewhere."""
    for number, one in list(versions(state, ref)):
        if one.position == before:
            put(state, ref, number, one._replace(position=position, length=length))
