"""Copies of dead letters in other topics, so that none is made twice by mistake.

Table `copies` has a row for each, which ends with the row of the message in table
`failed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.letter_edits import FailedRef
    from txmq.core.state.state import State


class LetterCopy(NamedTuple):
    """A copy, and who made it. `number` is that of the death that it is of."""

    number: int
    topic_id: int
    partition: int
    offset: int
    at: int
    by: str
    reason: str
    group_id: int = 0  # of the group that was given the message itself; 0 = a topic has it


def copies(state: State, ref: FailedRef) -> Iterator[LetterCopy]:
    """Yield the copies of a message, oldest first."""
    for _key, row in _rows(state, ref):
        yield LetterCopy(*row)


def copy_of(state: State, ref: FailedRef, number: int, topic_id: int) -> LetterCopy | None:
    """Return the copy of a death in a topic."""
    found = (one for one in copies(state, ref) if not one.group_id)
    return next((one for one in found if one[:2] == (number, topic_id)), None)


def was_given(state: State, ref: FailedRef, number: int, group_id: int) -> bool:
    """Return True if this death was given to another group."""
    return any((one.number, one.group_id) == (number, group_id) for one in copies(state, ref))


def add(state: State, ref: FailedRef, nth: int, one: LetterCopy) -> None:
    """Apply: note a copy."""
    state.tables[t.COPIES].put(t.EDIT_KEY.pack(*ref, nth), tuple(one))


def forget(state: State, ref: FailedRef) -> None:
    """Apply: the row of the message is removed for good."""
    for key, _row in list(_rows(state, ref)):
        state.tables[t.COPIES].delete(key)


def _rows(state: State, ref: FailedRef) -> Iterator[tuple[bytes, Any]]:
    start, stop = (t.EDIT_KEY.pack(*ref, number) for number in (0, t.MAX_EDIT))
    return state.tables[t.COPIES].range(start, stop)
