"""Clones: a new group that continues where another group is.

If many messages of the source have failed, the clone is made in steps. Nothing of the
clone is delivered before the last step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.background_work import STEP_ROWS
from txmq.core.consumers.commands import CloneGroup
from txmq.core.consumers.membership import MAX_GROUPS
from txmq.core.events.consumers import CloneBegun, CloneContinued, CloneEnded, GroupCloned
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, failed_messages, failed_rows
from txmq.core.state.consumer_groups import BROADCAST, CloneProgress, ConsumerGroup
from txmq.core.state.positions import UNDELIVERED, GroupPosition, Redelivery
from txmq.core.state.ranges import RangeMap, gaps
from txmq.core.state.state import State
from txmq.errors import BadRequest, Conflict, Throttled
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.model.topic_partition import TopicPartition

# Failed messages of a partition below the offset that retention has reached; a clone
# checks all of them at once.
MAX_ROWS_READ = 2_000


class CloneReply(NamedTuple):
    """`pending`: the clone is made in steps, and delivers nothing until it is
    complete.
    """

    pending: bool = False


def decide_clone(state: State, command: CloneGroup, _now: int) -> Outcome:
    source = find_group(state, command.group)
    _refuse(state, source, command.to)
    large = len(failed_messages.messages_of_group(state, source, STEP_ROWS + 1)) > STEP_ROWS
    kind = CloneBegun if large else GroupCloned
    epochs = state.groups.past_epochs.get(command.to, ())
    cloned = kind(state.groups.next_group_id, command.to, source.group_id, command.by, epochs)
    return Outcome((cloned,), CloneReply(pending=large))


def _refuse(state: State, source: ConsumerGroup, to: str) -> None:
    groups = state.groups.by_name
    if source.settings.mode == BROADCAST or "@" in to:
        raise BadRequest(
            f"{source.name!r} cannot be cloned to {to!r}: one of them is a broadcast group",
            hint="join with a new name: each member of a broadcast group has its own position",
        )
    if to in groups:
        raise Conflict(
            f"consumer group {to!r} exists already",
            hint="choose another name, or delete that group",
        )
    if source.pending_resets or source.clone_progress is not None:
        reason = "it is being reset" if source.pending_resets else "it is still being cloned itself"
        raise Conflict(
            f"{source.name!r} cannot be cloned: {reason}",
            hint="wait until that is complete: txmq group show",
        )
    if len(groups) >= MAX_GROUPS:
        raise Throttled(
            f"there are {MAX_GROUPS} consumer groups, the maximum", hint="delete some first"
        )
    if any(_has_expired_rows(state, source, tp) for tp in source.positions):
        message = (
            f"{source.name!r} cannot be cloned: "
            "retention has passed messages that wait for redelivery"
        )
        raise Conflict(
            message,
            hint="wait for the retries, or abandon the dead letters they wait for: txmq dlq",
        )


def _has_expired_rows(state: State, source: ConsumerGroup, tp: TopicPartition) -> bool:
    """Return True if the clone needs messages that only rows of the source still have.

    Also True if there are too many such messages to check.
    """
    first = state.topics_by_id[tp[0]].start_offsets[tp[1]]
    rows = failed_messages.rows_between(state, source, tp, 0, first, MAX_ROWS_READ + 1)
    return len(rows) > MAX_ROWS_READ or any(
        row.kind in failed_rows.DELIVERABLE for _ref, row in rows
    )


def apply_cloned(state: State, event: GroupCloned, _context: RecordContext) -> None:
    source = state.groups.by_id[event.source]
    clone = _create(state, event, source)
    _redeliver_rows(state, source, clone, failed_messages.messages_of_group(state, source, None))
    _raise_floors(state, clone)


def apply_begun(state: State, event: CloneBegun, _context: RecordContext) -> None:
    source = state.groups.by_id[event.source]
    clone = _create(state, event, source)
    clone.clone_progress = CloneProgress(event.source)
    source.unfinished_clones.add(clone.group_id)
    state.groups.cloning.add(clone.group_id)


def apply_continued(state: State, event: CloneContinued, _context: RecordContext) -> None:
    clone = state.groups.by_id[event.group_id]
    assert clone.clone_progress is not None, "it is being made"
    source = state.groups.by_id[clone.clone_progress.source]
    rows = failed_messages.messages_of_group(state, source, event.most, clone.clone_progress.start)
    _redeliver_rows(state, source, clone, rows)
    topic_id, partition, offset = rows[-1]
    clone.clone_progress = clone.clone_progress._replace(start=(topic_id, partition, offset + 1))
    state.groups.dirty_groups.add(clone.group_id)


def apply_ended(state: State, event: CloneEnded, _context: RecordContext) -> None:
    clone = state.groups.by_id[event.group_id]
    state.groups.end_clone(clone)
    _raise_floors(state, clone)


def _create(state: State, event: GroupCloned | CloneBegun, source: ConsumerGroup) -> ConsumerGroup:
    """Return the clone, as if no message of the source had failed."""
    clone = ConsumerGroup(event.group_id, event.name, source.settings, paused=source.paused)
    clone.set_epochs(event.epochs)
    clone.paused_topics = set(source.paused_topics)
    state.groups.add(clone)
    for tp in source.positions:
        clone.positions[tp] = _position(state, source, tp)
        state.groups.position_for_update(clone, tp)
    return clone


def _position(state: State, source: ConsumerGroup, tp: TopicPartition) -> GroupPosition:
    """Return the clone's position in a partition.

    Messages are settled if they are settled or have failed in the source.
    """
    position = source.positions[tp]
    pending: RangeMap[Redelivery] = RangeMap()
    for ranges in (position.leased, position.redeliver, position.reserved):
        for held in ranges:
            pending.put(held.start, held.end, UNDELIVERED)
    lowest = [ref[2] for ref, _row in failed_messages.rows_between(state, source, tp, 0, t.SIGN, 1)]
    floor = min(
        [
            position.cursor,
            *lowest,
            *(first.start for first in [pending.first()] if first is not None),
        ]
    )
    # Dead letters may be older than the first message that retention keeps.
    floor = max(floor, state.topics_by_id[tp[0]].start_offsets[tp[1]])
    settled: RangeMap[None] = RangeMap(
        (start, end, None) for start, end in gaps(pending, floor, position.cursor)
    )
    return GroupPosition(floor, position.cursor, settled, redeliver=pending)


def _redeliver_rows(
    state: State, source: ConsumerGroup, clone: ConsumerGroup, rows: list[tuple[int, int, int]]
) -> None:
    """Apply: messages of the source that wait for redelivery are pending in the clone,
    too.

    Dead letters of the source stay settled in the clone.
    """
    for ref in rows:
        row = failed_messages.get(state, source, ref)
        # None = it is processed, and not swept yet
        if row is not None and row.kind in failed_rows.DELIVERABLE:
            failed_changes.redeliver_in_clone(state, clone, ref)


def _raise_floors(state: State, clone: ConsumerGroup) -> None:
    """Apply: raise each floor to the first pending message."""
    for tp in clone.positions:
        position = state.groups.position_for_update(clone, tp)
        position.settle(position.floor, position.floor)


DECIDERS: Deciders = {CloneGroup: decide_clone}
APPLIERS: Appliers = {
    GroupCloned: apply_cloned,
    CloneBegun: apply_begun,
    CloneContinued: apply_continued,
    CloneEnded: apply_ended,
}
