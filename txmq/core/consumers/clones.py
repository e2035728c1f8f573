"""A group made from another one: it goes on where that one stands.

Where many of its messages have failed, that is done in slices: nothing of the clone is
delivered before the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import cloning, failed_messages
from txmq.core.consumers.authorization import known
from txmq.core.consumers.background_work import SLICE
from txmq.core.consumers.cloning import Cloning
from txmq.core.consumers.commands import GroupClone
from txmq.core.consumers.membership import MAX_GROUPS
from txmq.core.events.consumers import CloneBegun, CloneContinued, CloneEnded, GroupCloned
from txmq.core.state.consumer_groups import BROADCAST, Group
from txmq.core.state.positions import FIRST, Back, Position
from txmq.core.state.ranges import RangeMap, gaps
from txmq.core.state.state import Outcome, Rejected, State
from txmq.errors import BadRequest, Conflict, Throttled
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Spot

# failed messages of a partition that retention has passed: they are looked through in
# one go
LOOKED_AT = 2_000


class CloneReply(NamedTuple):
    """`pending`: so much has failed that it takes a moment, with nothing delivered."""

    pending: bool = False


def decide_clone(state: State, command: GroupClone, now: int) -> Outcome | Rejected:
    del now
    source = known(state, command.group)
    if isinstance(source, Rejected):
        return source
    refused = _refused(state, source, command.to)
    if refused is not None:
        return refused
    large = len(failed_messages.of_group(state, source, SLICE + 1)) > SLICE
    kind = CloneBegun if large else GroupCloned
    cloned = kind(state.consumers.next_group_id, command.to, source.group_id, command.by)
    return Outcome((cloned,), CloneReply(pending=large))


def _refused(state: State, source: Group, to: str) -> Rejected | None:
    groups = state.consumers.groups
    if source.settings.mode == BROADCAST or "@" in to:
        return Rejected(
            BadRequest,
            "members of a broadcast group each have a place of their own",
            "join by a new name",
        )
    if to in groups:
        return Rejected(
            Conflict, f"there is a consumer group {to!r}", "clone to a new name, or delete it first"
        )
    if source.resets or source.cloning is not None:
        what = "a reset of it is under way" if source.resets else "it is still being cloned itself"
        return Rejected(
            Conflict,
            f"{source.name!r} cannot be cloned: {what}",
            "wait for the end: txmq group show",
        )
    if len(groups) >= MAX_GROUPS:
        return Rejected(Throttled, f"there are {MAX_GROUPS} consumer groups", "delete some first")
    if any(_is_out_of_reach(state, source, spot) for spot in source.positions):
        message = f"retention has passed failed messages of {source.name!r} that are to be delivered again"
        return Rejected(
            Conflict, message, "let retries come to their end, or close dead letters: txmq dlq"
        )
    return None


def _is_out_of_reach(state: State, source: Group, spot: Spot) -> bool:
    """Whether a message is to be delivered in the clone, too, and only the source still
    has it; or nobody can tell.
    """
    first = state.topics_by_id[spot[0]].firsts[spot[1]]
    rows = failed_messages.between(state, source, spot, 0, first, LOOKED_AT + 1)
    return len(rows) > LOOKED_AT or any(
        row.kind in failed_messages.PENDING for _spotted, row in rows
    )


def apply_cloned(state: State, event: GroupCloned, place: Place) -> None:
    del place
    source = state.consumers.by_id[event.source]
    clone = _made(state, event.group_id, event.name, source)
    _look_through(state, source, clone, failed_messages.of_group(state, source, None))
    _end(state, clone)


def apply_begun(state: State, event: CloneBegun, place: Place) -> None:
    del place
    source = state.consumers.by_id[event.source]
    clone = _made(state, event.group_id, event.name, source)
    clone.cloning = Cloning(event.source)
    source.clones.add(clone.group_id)
    state.consumers.cloning.add(clone.group_id)


def apply_continued(state: State, event: CloneContinued, place: Place) -> None:
    del place
    clone = state.consumers.by_id[event.group_id]
    assert clone.cloning is not None, "it is being made"
    source = state.consumers.by_id[clone.cloning.source]
    rows = failed_messages.of_group(state, source, event.most, clone.cloning.start)
    _look_through(state, source, clone, rows)
    topic_id, partition, offset = rows[-1]
    clone.cloning = clone.cloning._replace(start=(topic_id, partition, offset + 1))
    state.consumers.dirty_groups.add(clone.group_id)


def apply_ended(state: State, event: CloneEnded, place: Place) -> None:
    del place
    clone = state.consumers.by_id[event.group_id]
    state.consumers.cloned(clone)
    _end(state, clone)


def _made(state: State, group_id: int, name: str, source: Group) -> Group:
    """The clone, as if no message had failed."""
    clone = Group(group_id, name, source.settings, paused=source.paused)
    clone.paused_topics = set(source.paused_topics)
    state.consumers.add(clone)
    for spot in source.positions:
        clone.positions[spot] = _position(state, source, spot)
        state.consumers.touch(clone, spot)
    return clone


def _position(state: State, source: Group, spot: Spot) -> Position:
    """Done with is what the source is done with or has moved, from the first message
    that may yet be pending on.
    """
    position = source.positions[spot]
    pending: RangeMap[Back] = RangeMap()
    for pieces in (position.leased, position.redeliver, position.reserved):
        for piece in pieces:
            pending.put(piece.start, piece.end, FIRST)
    lowest = [
        spotted[2] for spotted, _row in failed_messages.between(state, source, spot, 0, t.SIGN, 1)
    ]
    floor = min(
        [
            position.cursor,
            *lowest,
            *(piece.start for piece in [pending.first()] if piece is not None),
        ]
    )
    floor = max(floor, state.topics_by_id[spot[0]].firsts[spot[1]])  # letters may be of before
    settled: RangeMap[None] = RangeMap(
        (start, end, None) for start, end in gaps(pending, floor, position.cursor)
    )
    return Position(floor, position.cursor, settled, redeliver=pending)


def _look_through(
    state: State, source: Group, clone: Group, rows: list[tuple[int, int, int]]
) -> None:
    """What waits for another delivery in the source is to be delivered in the clone;
    dead letters are done with.
    """
    for spotted in rows:
        row = failed_messages.get(state, source, spotted)
        assert row is not None, "it was found"
        if row.kind in failed_messages.PENDING:
            cloning.take_in(state, clone, spotted)


def _end(state: State, clone: Group) -> None:
    """Below the first message that is pending everything is done with."""
    for spot in clone.positions:
        position = state.consumers.touch(clone, spot)
        position.settle(position.floor, position.floor)


DECIDERS: dict[type, Any] = {GroupClone: decide_clone}
APPLIERS: dict[type, Any] = {
    GroupCloned: apply_cloned,
    CloneBegun: apply_begun,
    CloneContinued: apply_continued,
    CloneEnded: apply_ended,
}
