"""Resets: a group continues from other offsets of a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import leases
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.background_work import STEP_ROWS, go_on_at, restore_rows
from txmq.core.consumers.commands import ResetPosition
from txmq.core.events.consumers import PositionReset, ResetBegun
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_messages, visibility
from txmq.core.state.consumer_groups import FIRST, LAST
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.positions import GroupPosition
from txmq.core.state.restores import newest_epoch
from txmq.core.state.state import State
from txmq.core.topics import topics
from txmq.errors import BadRequest, Conflict, OffsetOutOfRange, UnknownTopic
from txmq.model.measures import counted
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import Topic

MAX_ROWS_COUNTED = 10_000  # of each partition, in the preview


class ResetPartition(NamedTuple):
    """Effect of a reset on one partition.

    Messages below the old floor `before` were settled; `after` is the new offset. Of
    the messages at or above it, `again` were settled and are delivered again. `back`
    had failed and return to their places; at most `MAX_ROWS_COUNTED` are counted.
    `skipped` messages below it were not settled, and are never delivered.
    """

    partition: int
    before: int
    after: int
    again: int
    skipped: int
    back: int


class ResetReply(NamedTuple):
    """Effects of a reset. `pending`: failed messages are restored in steps.

    Until the last step, the partitions deliver nothing. Of the failed messages `edited`
    lose their edits: what was published is delivered.
    """

    positions: tuple[ResetPartition, ...]
    pending: bool = False
    edited: int = 0


def decide_reset(state: State, command: ResetPosition, _now: int) -> Outcome:
    group = find_group(state, command.group)
    topic = state.topics.get(command.topic)
    if topic is None or not any(tp[0] == topic.topic_id for tp in group.positions):
        message = f"consumer group {command.group!r} does not read topic {command.topic!r}"
        raise UnknownTopic(message, hint="list its topics: txmq group show")
    offsets = _new_offsets(state, topic, command)
    _refuse_conflict(state, group, topic, dict(offsets))
    targets = tuple(
        _preview(state, group, TopicPartition(topic.topic_id, partition), offset)
        for partition, offset in offsets
    )
    large = sum(target.back for target in targets) > STEP_ROWS
    edited = sum(
        row.edits > 0
        for partition, offset in offsets
        for row in _failed(state, group, TopicPartition(topic.topic_id, partition), offset)
    )
    reply = ResetReply(targets, pending=large, edited=edited)
    if command.dry_run:
        return Outcome(reply=reply)
    kind = ResetBegun if large else PositionReset
    epoch = newest_epoch(state, group) + 1 if command.reprocess else group.epoch
    begins = (epoch, command.by, group.generation + 1)
    return Outcome((kind(group.group_id, topic.topic_id, offsets, *begins),), reply)


def _refuse_conflict(
    state: State, group: ConsumerGroup, topic: Topic, offsets: dict[int, int]
) -> None:
    wait = "wait until that is complete: txmq group show"
    if group.unfinished_clones or group.clone_progress is not None:
        raise Conflict(f"consumer group {group.name!r} is being cloned", hint=wait)
    if any((topic.topic_id, partition) in group.pending_resets for partition in offsets):
        raise Conflict(f"a reset of topic {topic.name!r} is under way", hint=wait)
    split = _split_key(state, group, topic, offsets)
    if split is None:
        return
    raise Conflict(
        f"messages in partition {split.partition} of topic {topic.name!r} wait behind failed"
        " messages of their key, from before the topic grew",
        hint=f"reset partition {split.partition} too, to {split.offset} or below",
        detail=split._asdict(),
    )


class SplitKey(NamedTuple):
    """The first message that waits behind its key's failed message in another
    partition.
    """

    partition: int
    offset: int


def _split_key(
    state: State, group: ConsumerGroup, topic: Topic, offsets: dict[int, int]
) -> SplitKey | None:
    """Return a message that a reset would leave parked, while what it waits for returns
    to its place in the key's former partition; None if there is none.

    Nothing fences the key then, and the message would be delivered first.
    """
    if not group.ordered or topic.topic_id not in group.fences:
        return None
    for ends in topic.ends_at_growth:
        if not any(offset < end for end, offset in _pairs(ends, offsets)):
            continue
        for partition in range(len(topic.end_offsets)):
            tp = TopicPartition(topic.topic_id, partition)
            first = ends[partition] if partition < len(ends) else 0
            last = offsets.get(partition, t.SIGN)
            for ref, row in failed_messages.rows_between(
                state, group, tp, first, last, MAX_ROWS_COUNTED
            ):
                fence = group.fence(topic.topic_id, row.key_hash)
                if row.kind == FailedKind.PARKED and fence and fence.partition != partition:
                    return SplitKey(partition, ref[2])
    return None


def _pairs(ends: tuple[int, ...], offsets: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield each partition's end at a growth, and the offset that it is reset to."""
    return ((ends[number], offset) for number, offset in offsets.items() if number < len(ends))


def _new_offsets(state: State, topic: Topic, command: ResetPosition) -> tuple[tuple[int, int], ...]:
    # Including partitions that were added since the group last had members.
    partitions = range(len(topic.end_offsets))
    if command.to == FIRST:
        return tuple((p, topic.start_offsets[p]) for p in partitions)
    if command.to == LAST:
        return tuple((p, visibility.visible_end(state, topic.topic_id, p)) for p in partitions)
    if command.to or not command.offsets:
        raise BadRequest(
            f"a group cannot be reset to {command.to!r}", hint="name first, last, a time or offsets"
        )
    for partition, offset in command.offsets:
        if partition not in partitions or offset < 0:
            place = f"{topic.name}/{partition}"
            there = counted(len(partitions), "partition")
            message = f"{place} has no offset {offset}: the topic has {there}"
            raise OffsetOutOfRange(
                message,
                hint="check partitions and offsets: txmq topic show",
                detail={"offset": offset},
            )
        topics.check_offset(state, topic, partition, offset)
    return tuple(sorted(dict(command.offsets).items()))


def _preview(state: State, group: ConsumerGroup, tp: TopicPartition, offset: int) -> ResetPartition:
    position = group.positions.get(tp) or _initial_position(state, tp)
    pending_below = sum(
        pending.end - pending.start
        for ranges in (position.leased, position.redeliver, position.reserved)
        for pending in ranges.overlap(0, offset)
    )
    skipped = pending_below + max(0, offset - position.cursor)
    below_cursor = max(0, position.cursor - offset)
    back = len(_failed(state, group, tp, offset))
    again = below_cursor - (position.unsettled - pending_below if below_cursor else 0) - back
    return ResetPartition(tp[1], position.floor, offset, max(0, again), skipped, back)


def _failed(
    state: State, group: ConsumerGroup, tp: TopicPartition, offset: int
) -> list[FailedMessage]:
    """Return the failed messages that return to their places, as far as they are
    counted.
    """
    rows = failed_messages.rows_between(state, group, tp, offset, t.SIGN, MAX_ROWS_COUNTED)
    return [row for _ref, row in rows]


def _initial_position(state: State, tp: TopicPartition) -> GroupPosition:
    """Return the position of a partition that the group has not read yet."""
    first = state.topics_by_id[tp[0]].start_offsets[tp[1]]
    return GroupPosition(first, first)


def apply_begun(state: State, event: ResetBegun, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    _begin(state, group, event)
    group.pending_resets.update(
        {TopicPartition(event.topic_id, partition): offset for partition, offset in event.offsets}
    )
    state.groups.dirty_groups.add(group.group_id)
    state.groups.resetting.add(group.group_id)


def _begin(state: State, group: ConsumerGroup, event: PositionReset | ResetBegun) -> None:
    """Apply: begin the generation and the epoch of a reset.

    Members of an older generation are refused. Once they know the new one, they have
    forgotten what they held of these partitions, and know the epoch.
    """
    again = event.epoch > group.epoch
    group.epoch = event.epoch
    group.generation = max(group.generation, event.generation)
    for partition, offset in event.offsets:
        tp = TopicPartition(event.topic_id, partition)
        group.positions.setdefault(tp, _initial_position(state, tp))
        effects = state.groups.position_for_update(group, tp).effects
        if event.generation:
            group.resets[tp] = event.generation
        if again:
            group.begin_epoch(tp, offset)
            if effects is not None:
                effects.base = min(effects.base, offset)


def apply_reset(state: State, event: PositionReset, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    _begin(state, group, event)
    for partition, offset in event.offsets:
        tp = TopicPartition(event.topic_id, partition)
        restore_rows(state, group, tp, offset)
        rows = [ref for ref in group.leased_rows if ref[:2] == tp]
        leases.return_rows(state, group, [(*ref, context.stored_at) for ref in rows])
        # Retention may have deleted messages since the reset began.
        begin = max(offset, state.topics_by_id[tp[0]].start_offsets[tp[1]])
        go_on_at(state, group, tp, begin)


DECIDERS: Deciders = {ResetPosition: decide_reset}
APPLIERS: Appliers = {ResetBegun: apply_begun, PositionReset: apply_reset}
