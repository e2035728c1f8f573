"""Marks: how far a source has been taken over, kept for ever and moved by the
transactions that take it over.

A relay reads a source whose places grow, such as the log of a database. Each of its
transactions carries the action ("mark", name, before, to, at): it is stored only where
the mark stands at `before`, and once it is committed the mark stands at `to`. So what
was sent again is stored once however late it comes again, what follows a refused
transaction is refused as well, and a relay that was replaced and does not know it
cannot do any harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.state.state import Rejected, State
from txmq.errors import BadRequest, SequenceGap
from txmq.model.limits import SEQUENCE
from txmq.model.message import is_name
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable

Action = tuple[object, ...]


class Mark(NamedTuple):
    """A row of table `marks`: the place reached, when the source committed it, and the
    transaction that moved it.
    """

    place: int
    at: int
    token: bytes


class MarkAction(NamedTuple):
    """The mark moves with the transaction."""

    name: str
    before: int
    to: int
    at: int  # of the source's commit, in microseconds; kept for whoever compares


UNSET = Mark(0, 0, b"")


def parse(action: Action) -> MarkAction | None:
    """The action in its raw form; None = it is of another kind."""
    match action:
        case ("mark", str(name), int(before), int(to), int(at)):
            return MarkAction(name, before, to, at)
    return None


def get(state: State, name: str) -> Mark:
    """The mark of that name."""
    row = state.tables[t.MARKS].get(name.encode())
    return UNSET if row is None else Mark._make(row)


def check(state: State, action: MarkAction) -> Rejected | None:
    """Why a transaction may not move the mark so; None = it may."""
    if not is_name(action.name) or not 0 <= action.before < action.to <= SEQUENCE:
        return Rejected(BadRequest, "a mark has a name, and moves forward")
    stands = get(state, action.name).place
    if stands != action.before:
        message = f"mark {action.name} stands at {stands}, not at {action.before}"
        return Rejected(SequenceGap, message, "go on from where it stands", {"place": stands})
    return None


def passed(state: State, actions: Iterable[Action]) -> bool:
    """Whether what these actions stand for was taken over before."""
    moves = filter(None, map(parse, actions))
    return any(
        action.to <= get(state, action.name).place for action in moves if is_name(action.name)
    )


def move(state: State, action: MarkAction, token: bytes) -> None:
    """Apply: the transaction is committed. One that was decided late does not take the
    mark back.
    """
    if action.to > get(state, action.name).place:
        state.tables[t.MARKS].put(action.name.encode(), Mark(action.to, action.at, token))
