"""Groups are deleted, cloned, and messages brought back a slice at a time: there may be
a million, and no apply takes long.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import failed_messages, key_fences, leases
from txmq.core.consumers.commands import GroupDelete, TidyGroups
from txmq.core.consumers.group_admin import family
from txmq.core.events.consumers import (
    BroughtBack,
    CloneContinued,
    CloneEnded,
    GroupDeleted,
    GroupTidied,
    PositionReset,
)
from txmq.core.state.state import Outcome, Rejected, State
from txmq.errors import Conflict
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import Event, Place
    from txmq.core.state.consumer_groups import Group, Spot

SLICE = 250  # rows that one record may touch


class TidyReply(NamedTuple):
    """Whether anything is left to do."""

    more: bool


def decide_delete(state: State, command: GroupDelete, now: int) -> Outcome | Rejected:
    del now
    found = family(state, command.group)
    if isinstance(found, Rejected):
        return found
    members = [name for group in found for name in group.members]
    if members:
        message = f"consumer group {command.group!r} has members: {', '.join(members[:3])}"
        return Rejected(Conflict, message, "stop them first")
    if any(group.clones for group in found):
        message = f"consumer group {command.group!r} is being cloned"
        return Rejected(
            Conflict, message, "wait for the end (txmq group show), or delete the clone first"
        )
    return Outcome(
        tuple(GroupDeleted(group.group_id, command.by, SLICE) for group in reversed(found))
    )


def decide_tidy(state: State, command: TidyGroups, now: int) -> Outcome:
    del command, now
    doomed = next(iter(state.consumers.doomed), None)
    if doomed is not None:
        return Outcome((GroupTidied(doomed, SLICE),), TidyReply(more=True))
    resetting, cloning = (
        min(some, default=0) for some in (state.consumers.resetting, state.consumers.cloning)
    )
    if resetting:
        return Outcome((_next_step(state, state.consumers.by_id[resetting]),), TidyReply(more=True))
    if cloning:
        return Outcome(
            (_next_of_clone(state, state.consumers.by_id[cloning]),), TidyReply(more=True)
        )
    return Outcome(reply=TidyReply(more=False))


def _next_step(state: State, group: Group) -> Event:
    """Of the resets of one topic: another slice is brought back, or it was all."""
    topic_id = next(iter(group.resets))[0]
    offsets = {spot[1]: offset for spot, offset in group.resets.items() if spot[0] == topic_id}
    for partition, offset in offsets.items():
        if failed_messages.between(state, group, (topic_id, partition), offset, t.SIGN, 1):
            return BroughtBack(group.group_id, topic_id, partition, offset, SLICE)
    firsts = state.topics_by_id[topic_id].firsts  # retention may have moved on meanwhile
    kept = tuple(
        (partition, max(offset, firsts[partition])) for partition, offset in sorted(offsets.items())
    )
    return PositionReset(group.group_id, topic_id, kept, group.epoch, "")


def _next_of_clone(state: State, clone: Group) -> Event:
    assert clone.cloning is not None, "it is being made"
    source, start = clone.cloning
    left = failed_messages.of_group(state, state.consumers.by_id[source], 1, start)
    return CloneContinued(clone.group_id, SLICE) if left else CloneEnded(clone.group_id)


def bring_back(
    state: State, group: Group, spot: Spot, offset: int, most: int | None = None
) -> None:
    """Apply: messages of a partition at or above `offset` that had left their place are
    back in it.
    """
    for spotted, row in failed_messages.between(state, group, spot, offset, t.SIGN, most):
        failed_messages.drop(state, group, spotted)
        leases.release_row(state, group, spotted)
        key_fences.head_done(state, group, spotted, row.key_hash)


def delete(state: State, group: Group, most: int = SLICE) -> None:
    """Apply: the group is gone; at most so many of its rows and fences are, too."""
    for number in tuple(group.leases):
        leases.end(state, group, number)
    state.consumers.doom(group)
    _tidy(state, group, most)


def _tidy(state: State, group: Group, most: int) -> None:
    rows = failed_messages.of_group(state, group, most)
    for spotted in rows:
        failed_messages.drop(state, group, spotted)
        leases.release_row(state, group, spotted)
    left = most - len(rows)
    for topic_id, key_hash, _fence in list(islice(group.every_fence(), left)):
        group.set_fence(topic_id, key_hash, None)
        state.consumers.dirty_fences.add((group.group_id, topic_id, key_hash))
    if left and not group.fences:
        for spot in group.positions:
            state.tables[t.PASSED].delete(t.POSITION_KEY.pack(group.group_id, *spot))
        state.consumers.forget(group)


def apply_deleted(state: State, event: GroupDeleted, place: Place) -> None:
    del place
    delete(state, state.consumers.by_id[event.group_id], event.most)


def apply_tidied(state: State, event: GroupTidied, place: Place) -> None:
    del place
    _tidy(state, state.consumers.doomed[event.group_id], event.most)


def apply_brought_back(state: State, event: BroughtBack, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    bring_back(state, group, (event.topic_id, event.partition), event.offset, event.most)


DECIDERS: dict[type, Any] = {GroupDelete: decide_delete, TidyGroups: decide_tidy}
APPLIERS: dict[type, Any] = {
    GroupDeleted: apply_deleted,
    GroupTidied: apply_tidied,
    BroughtBack: apply_brought_back,
}
