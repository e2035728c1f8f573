"""Watermarks: how far a source has been taken over.

A relay reads a source whose positions grow, such as the log of a database. Each of its
transactions carries a watermark action, and is stored only if the watermark stands at
the action's `before`. Its commit moves the watermark to `to`. Three things follow:

- What is sent again is stored once, however late it comes again.
- What follows a refused transaction is refused as well.
- A relay that was replaced without noticing does no harm.

Watermarks are kept for ever, in table `watermarks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.errors import BadRequest, SequenceGap
from txmq.model.actions import WatermarkAction, read_action
from txmq.model.limits import SEQUENCE
from txmq.model.message import is_name
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.state.state import State


class Watermark(NamedTuple):
    """A row of table `watermarks`.

    `place` is the position reached, `at` the time of the source's commit, `token` the
    transaction that moved it.
    """

    place: int
    at: int
    token: bytes


UNSET = Watermark(0, 0, b"")


def get(state: State, name: str) -> Watermark:
    """Return the watermark of that name."""
    row = state.tables[t.WATERMARKS].get(name.encode())
    return UNSET if row is None else Watermark._make(row)


def check(state: State, action: WatermarkAction) -> None:
    """Refuse a move of the watermark that does not go on from where it stands."""
    if not is_name(action.name) or not 0 <= action.before < action.to <= SEQUENCE:
        raise BadRequest(
            f"invalid mark {action.name!r:.200} from {action.before} to {action.to}",
            hint="a mark has a name, and moves forward",
        )
    place = get(state, action.name).place
    if place != action.before:
        message = f"mark {action.name} stands at {place}, not at {action.before}"
        raise SequenceGap(message, hint="go on from where it stands", detail={"place": place})


def is_passed(state: State, actions: Iterable[tuple[object, ...]]) -> bool:
    """Return whether a watermark has passed what one of these actions stands for."""
    moves = [action for action in map(read_action, actions) if isinstance(action, WatermarkAction)]
    return any(
        action.to <= get(state, action.name).place for action in moves if is_name(action.name)
    )


def advance(state: State, action: WatermarkAction, token: bytes) -> None:
    """Apply: the transaction is committed.

    A transaction that was decided late does not move the watermark back.
    """
    if action.to > get(state, action.name).place:
        state.tables[t.WATERMARKS].put(action.name.encode(), Watermark(action.to, action.at, token))
