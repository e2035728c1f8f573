"""Groups go on from other offsets of a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import failed_messages, leases
from txmq.core.consumers.authorization import known
from txmq.core.consumers.background_work import SLICE, bring_back
from txmq.core.consumers.commands import ResetPosition
from txmq.core.events.consumers import PositionReset, ResetBegun
from txmq.core.state import visibility
from txmq.core.state.consumer_groups import FIRST, LAST
from txmq.core.state.positions import Position
from txmq.core.state.state import Outcome, Rejected, State
from txmq.core.topics import topics
from txmq.errors import BadRequest, Conflict, OffsetOutOfRange, UnknownTopic
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Group, Spot
    from txmq.core.state.state import Topic

ROWS_COUNTED = 10_000  # of each partition, for the preview


class Target(NamedTuple):
    """What a reset means for a partition. `before` is the offset up to which all was
    done, `after` the new one.

    Of the messages at or above the new offset, `again` were done with and come again,
    `back` had failed and are back in their place (counted up to `ROWS_COUNTED`);
    `skipped` below it were not done with, and never come.
    """

    partition: int
    before: int
    after: int
    again: int
    skipped: int
    back: int


class ResetReply(NamedTuple):
    """What a reset means. `pending`: so much is to be brought back that it takes a
    moment, with nothing delivered.
    """

    positions: tuple[Target, ...]
    pending: bool = False


def decide_reset(state: State, command: ResetPosition, now: int) -> Outcome | Rejected:
    del now
    group = known(state, command.group)
    if isinstance(group, Rejected):
        return group
    topic = state.topics.get(command.topic)
    if topic is None or not any(spot[0] == topic.topic_id for spot in group.positions):
        message = f"consumer group {command.group!r} does not read topic {command.topic!r}"
        return Rejected(UnknownTopic, message, "see: txmq group show")
    offsets = _targets(state, topic, command)
    if isinstance(offsets, Rejected):
        return offsets
    if busy := _busy(group, topic, offsets):
        return Rejected(Conflict, busy, "wait for the end: txmq group show")
    targets = tuple(
        _meaning(state, group, (topic.topic_id, partition), offset) for partition, offset in offsets
    )
    large = sum(target.back for target in targets) > SLICE
    reply = ResetReply(targets, pending=large)
    if command.dry_run:
        return Outcome(reply=reply)
    kind = ResetBegun if large else PositionReset
    epoch = group.epoch + command.reprocess
    return Outcome((kind(group.group_id, topic.topic_id, offsets, epoch, command.by),), reply)


def _busy(group: Group, topic: Topic, offsets: tuple[tuple[int, int], ...]) -> str:
    if group.clones or group.cloning is not None:
        return f"consumer group {group.name!r} is being cloned"
    resetting = any((topic.topic_id, partition) in group.resets for partition, _offset in offsets)
    return f"a reset of topic {topic.name!r} is under way" if resetting else ""


def _targets(
    state: State, topic: Topic, command: ResetPosition
) -> tuple[tuple[int, int], ...] | Rejected:
    partitions = range(
        len(topic.ends)
    )  # also those that it has grown since the group last had members
    if command.to == FIRST:
        return tuple((p, topic.firsts[p]) for p in partitions)
    if command.to == LAST:
        return tuple((p, visibility.end(state, topic.topic_id, p)) for p in partitions)
    if command.to or not command.offsets:
        return Rejected(
            BadRequest, f"no offset {command.to!r} to go on from", "first, last, a time or offsets"
        )
    for partition, offset in command.offsets:
        if partition not in partitions or offset < 0:
            place = f"{topic.name}/{partition}"
            message = f"{place} has no offset {offset}: it has {len(partitions)} partitions, from 0"
            return Rejected(OffsetOutOfRange, message, "see: txmq topic show", {"offset": offset})
        if outside := topics.outside(state, topic, partition, offset):
            return outside
    return tuple(sorted(dict(command.offsets).items()))


def _meaning(state: State, group: Group, spot: Spot, offset: int) -> Target:
    position = group.positions.get(spot) or _unread(state, spot)
    undone_below = sum(
        piece.end - piece.start
        for pieces in (position.leased, position.redeliver, position.reserved)
        for piece in pieces.overlap(0, offset)
    )
    skipped = undone_below + max(0, offset - position.cursor)
    below_cursor = max(0, position.cursor - offset)
    back = len(failed_messages.between(state, group, spot, offset, t.SIGN, ROWS_COUNTED))
    again = below_cursor - (position.unsettled - undone_below if below_cursor else 0) - back
    return Target(spot[1], position.floor, offset, max(0, again), skipped, back)


def _unread(state: State, spot: Spot) -> Position:
    """Where a partition begins that the group has not heard of."""
    first = state.topics_by_id[spot[0]].firsts[spot[1]]
    return Position(first, first)


def apply_begun(state: State, event: ResetBegun, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    group.epoch = event.epoch
    group.resets.update(
        {(event.topic_id, partition): offset for partition, offset in event.offsets}
    )
    state.consumers.dirty_groups.add(group.group_id)
    state.consumers.resetting.add(group.group_id)


def apply_reset(state: State, event: PositionReset, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    group.epoch = event.epoch
    for partition, offset in event.offsets:
        spot = (event.topic_id, partition)
        group.positions.setdefault(spot, _unread(state, spot))
        bring_back(state, group, spot, offset)
        leases.release(state, group, spot, 0, group.positions[spot].cursor)
        begin = max(
            offset, state.topics_by_id[spot[0]].firsts[spot[1]]
        )  # retention may have gone on meanwhile
        group.positions[spot] = Position(begin, begin)
        group.suspects.discard(spot)
        group.resets.pop(spot, None)
    if not group.resets:
        state.consumers.resetting.discard(group.group_id)


DECIDERS: dict[type, Any] = {ResetPosition: decide_reset}
APPLIERS: dict[type, Any] = {ResetBegun: apply_begun, PositionReset: apply_reset}
