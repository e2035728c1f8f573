"""A group made from another one: it goes on where that one stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.broker.core import moved
from txmq.broker.core import tables as t
from txmq.broker.core.consumer_commands import GroupClone
from txmq.broker.core.consumer_events import GroupCloned
from txmq.broker.core.consumers import BROADCAST, Group
from txmq.broker.core.groups import MAX_GROUPS
from txmq.broker.core.members import known
from txmq.broker.core.moved import Kind
from txmq.broker.core.positions import FIRST, Back, Position
from txmq.broker.core.ranges import RangeMap, gaps
from txmq.broker.core.state import Outcome, Rejected, State
from txmq.errors import BadRequest, Conflict, Throttled

if TYPE_CHECKING:
    from txmq.broker.core.consumers import Spot, Spotted
    from txmq.broker.core.events import Place

MOST_ROWS = 2_000  # moved messages of a group that can be cloned: they are looked through in one go
PENDING = (Kind.RETRY, Kind.PARKED)


def decide_clone(state: State, command: GroupClone, now: int) -> Outcome | Rejected:
    del now
    source = known(state, command.group)
    if isinstance(source, Rejected):
        return source
    refused = _refused(state, source, command.to)
    cloned = GroupCloned(state.consumers.next_group_id, command.to, source.group_id, command.by)
    return Outcome((cloned,)) if refused is None else refused


def _refused(state: State, source: Group, to: str) -> Rejected | None:
    groups = state.consumers.groups
    if source.settings.mode == BROADCAST or "@" in to:
        return Rejected(BadRequest, "members of a broadcast group each have a place of their own", "join by a new name")
    if to in groups:
        return Rejected(Conflict, f"there is a consumer group {to!r}", "clone to a new name, or delete it first")
    if source.resets:
        return Rejected(Conflict, f"a reset of {source.name!r} is under way", "wait for its end: txmq group show")
    if len(groups) >= MAX_GROUPS:
        return Rejected(Throttled, f"there are {MAX_GROUPS} consumer groups", "delete some first")
    rows = moved.of_group(state, source, MOST_ROWS + 1)
    if len(rows) > MOST_ROWS or any(_is_out_of_reach(state, source, spotted) for spotted in rows):
        message = f"more than {MOST_ROWS} messages of {source.name!r} have failed, or some that retention has passed"
        return Rejected(Conflict, message, "let retries come to their end, or close dead letters: txmq dlq")
    return None


def _is_out_of_reach(state: State, source: Group, spotted: Spotted) -> bool:
    """Whether the message is to be delivered in the clone, too, and only the source still has it."""
    topic_id, partition, offset = spotted
    row = moved.get(state, source, spotted)
    assert row is not None, "it was found"
    return row.kind in PENDING and offset < state.topics_by_id[topic_id].firsts[partition]


def apply_cloned(state: State, event: GroupCloned, place: Place) -> None:
    del place
    source = state.consumers.by_id[event.source]
    group = Group(event.group_id, event.name, source.settings, paused=source.paused)
    group.paused_topics = set(source.paused_topics)
    state.consumers.add(group)
    for spot in source.positions:
        group.positions[spot] = _position(state, source, spot)
        state.consumers.touch(group, spot)


def _position(state: State, source: Group, spot: Spot) -> Position:
    """Done with is what the source is done with, dead letters included; the rest waits to be delivered."""
    position = source.positions[spot]
    pending: RangeMap[Back] = RangeMap()
    for pieces in (position.leased, position.redeliver, position.reserved):
        for piece in pieces:
            pending.put(piece.start, piece.end, FIRST)
    for spotted, row in moved.between(state, source, spot, 0, t.SIGN):
        if row.kind in PENDING:
            pending.put(spotted[2], spotted[2] + 1, FIRST)
    first = pending.first()
    floor = position.cursor if first is None else first.start
    settled: RangeMap[None] = RangeMap((start, end, None) for start, end in gaps(pending, floor, position.cursor))
    return Position(floor, position.cursor, settled, redeliver=pending)


DECIDERS: dict[type, Any] = {GroupClone: decide_clone}
APPLIERS: dict[type, Any] = {GroupCloned: apply_cloned}
