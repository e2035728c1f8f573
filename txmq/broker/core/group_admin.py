"""What operators do to consumer groups: settings, pause, reset, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.broker.core import fences, gates, guard, leases, moved, topics
from txmq.broker.core import tables as t
from txmq.broker.core.consumer_commands import GroupDelete, GroupPause, GroupSet, ResetPosition
from txmq.broker.core.consumer_events import GroupChanged, GroupDeleted, GroupPaused, PositionReset
from txmq.broker.core.consumers import FIRST, LAST, Settings, Spot
from txmq.broker.core.group_settings import altered
from txmq.broker.core.members import known
from txmq.broker.core.positions import Position
from txmq.broker.core.state import Outcome, Rejected, State
from txmq.errors import BadRequest, Conflict, OffsetOutOfRange, UnknownTopic

if TYPE_CHECKING:
    from txmq.broker.core.consumers import Group
    from txmq.broker.core.events import Place
    from txmq.broker.core.state import Topic


class ResetReply(NamedTuple):
    """For each partition: its number, the offset up to which all was done before, and the new one."""

    positions: tuple[tuple[int, int, int], ...]


def _family(state: State, name: str) -> list[Group] | Rejected:
    """The group and, of a broadcast group, those of its members."""
    group = known(state, name)
    if isinstance(group, Rejected):
        return group
    return [group, *(other for other in state.consumers.by_id.values() if other.parent == group.group_id)]


def decide_set(state: State, command: GroupSet, now: int) -> Outcome | Rejected:
    del now
    family = _family(state, command.group)
    if isinstance(family, Rejected):
        return family
    changed = []
    for group in family:
        settings = altered(command.wanted, group.settings)
        if isinstance(settings, Rejected):
            return settings
        if settings != group.settings:
            changed.append(GroupChanged(group.group_id, settings, command.by))
    return Outcome(tuple(changed))


def decide_pause(state: State, command: GroupPause, now: int) -> Outcome | Rejected:
    del now
    family = _family(state, command.group)
    if isinstance(family, Rejected):
        return family
    changed = [group for group in family if group.paused is not command.paused or _guarded(group, command)]
    return Outcome(tuple(GroupPaused(group.group_id, command.paused, command.by) for group in changed))


def _guarded(group: Group, command: GroupPause) -> bool:
    """Whether an operator ends what the guard began."""
    return group.flood is not None and not command.paused


def decide_delete(state: State, command: GroupDelete, now: int) -> Outcome | Rejected:
    del now
    family = _family(state, command.group)
    if isinstance(family, Rejected):
        return family
    members = [name for group in family for name in group.members]
    if members:
        message = f"consumer group {command.group!r} has members: {', '.join(members[:3])}"
        return Rejected(Conflict, message, "stop them first")
    return Outcome(tuple(GroupDeleted(group.group_id, command.by) for group in reversed(family)))


def decide_reset(state: State, command: ResetPosition, now: int) -> Outcome | Rejected:
    del now
    group = known(state, command.group)
    if isinstance(group, Rejected):
        return group
    topic = state.topics.get(command.topic)
    if topic is None or not any(spot[0] == topic.topic_id for spot in group.positions):
        return Rejected(UnknownTopic, f"consumer group {command.group!r} does not read topic {command.topic!r}")
    offsets = _targets(state, group, topic, command)
    if isinstance(offsets, Rejected):
        return offsets
    reply = ResetReply(tuple((p, group.positions[topic.topic_id, p].floor, offset) for p, offset in offsets))
    if command.dry_run:
        return Outcome(reply=reply)
    epoch = group.epoch + command.reprocess
    return Outcome((PositionReset(group.group_id, topic.topic_id, offsets, epoch, command.by),), reply)


def _targets(
    state: State, group: Group, topic: Topic, command: ResetPosition
) -> tuple[tuple[int, int], ...] | Rejected:
    partitions = [p for p in range(len(topic.ends)) if (topic.topic_id, p) in group.positions]
    if command.to in (FIRST, LAST):
        ends = (
            topic.firsts
            if command.to == FIRST
            else [gates.end(state, topic.topic_id, p) for p in range(len(topic.ends))]
        )
        return tuple((p, ends[p]) for p in partitions)
    if command.to or not command.offsets:
        return Rejected(BadRequest, f"no offset {command.to!r} to go on from", "first, last, a time or offsets")
    for partition, offset in command.offsets:
        if partition not in partitions or offset < 0:
            place = f"{topic.name}/{partition}"
            return Rejected(OffsetOutOfRange, f"offset {offset} of {place} is out of range", detail={"offset": offset})
        if outside := topics.outside(state, topic, partition, offset):
            return outside
    return tuple(sorted(dict(command.offsets).items()))


def apply_changed(state: State, event: GroupChanged, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    group.settings = Settings(*event.settings)
    if not group.settings.flood_keys:
        guard.lift(group)
    state.consumers.dirty_groups.add(event.group_id)


def apply_paused(state: State, event: GroupPaused, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    group.paused = event.paused
    if not event.paused:
        guard.lift(group)
    state.consumers.dirty_groups.add(event.group_id)


def apply_deleted(state: State, event: GroupDeleted, place: Place) -> None:
    del place
    delete(state, state.consumers.by_id[event.group_id])


def delete(state: State, group: Group) -> None:
    """Apply: the group and all it knew are gone."""
    consumers = state.consumers
    for number in tuple(group.leases):
        leases.end(state, group, number)
    for spot in group.positions:
        _bring_back(state, group, spot, 0)
        consumers.touch(group, spot)
        state.tables[t.PASSED].delete(t.POSITION_KEY.pack(group.group_id, *spot))
    consumers.dirty_fences.update((group.group_id, topic_id, key) for topic_id, key, _fence in group.every_fence())
    consumers.dirty_groups.add(group.group_id)
    del consumers.by_id[group.group_id], consumers.groups[group.name]


def _bring_back(state: State, group: Group, spot: Spot, offset: int) -> None:
    """Apply: messages of a partition at or above `offset` that had left their place are back in it."""
    for spotted, row in moved.between(state, group, spot, offset, t.SIGN):
        moved.drop(state, group, spotted)
        leases.release_row(state, group, spotted)
        fences.head_done(state, group, spotted, row.key_hash)


def apply_reset(state: State, event: PositionReset, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    group.epoch = event.epoch
    for partition, offset in event.offsets:
        spot = (event.topic_id, partition)
        _bring_back(state, group, spot, offset)
        leases.release(state, group, spot, 0, group.positions[spot].cursor)
        group.positions[spot] = Position(offset, offset)


DECIDERS: dict[type, Any] = {
    GroupSet: decide_set,
    GroupPause: decide_pause,
    GroupDelete: decide_delete,
    ResetPosition: decide_reset,
}
APPLIERS: dict[type, Any] = {
    GroupChanged: apply_changed,
    GroupPaused: apply_paused,
    GroupDeleted: apply_deleted,
    PositionReset: apply_reset,
}
