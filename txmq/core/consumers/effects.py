"""Effects that inboxes have, and those that they lack: a database was restored.

A consumer with an inbox opens each partition once, with what its inbox has. From then
on, what the group has settled must be in the inbox, but for failed messages and for
those that an operator, retention or a time to live passed over (`EffectsRecord`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import key_fences, leases
from txmq.core.consumers.authorization import find_group
from txmq.core.events.consumers import EffectsPassed, EffectsRestored, InboxOpened
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, failed_messages, local_stores
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.positions import FAR, EffectsRecord
from txmq.core.state.ranges import RangeMap
from txmq.core.state.restores import epoch_of, epoch_start, epoch_steps
from txmq.errors import Conflict, UnknownTopic
from txmq.model.topic_partition import FIRST_EPOCH, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.positions import GroupPosition
    from txmq.core.state.state import State

OffsetRange = tuple[int, int]


class InboxPartition(NamedTuple):
    """A partition of a group as a member names it. The topic's id tells it from another
    topic of the same name.
    """

    group: str
    topic: str
    topic_id: int
    partition: int


class OpenInbox(NamedTuple):
    """Record that an inbox with these ranges has the effects from now on."""

    at: InboxPartition
    applied: tuple[OffsetRange, ...]


class RestoreEffects(NamedTuple):
    """Deliver settled messages again, whose effects an inbox lacks.

    `lost`: those that are not retained any more are passed over instead.
    """

    at: InboxPartition
    ranges: tuple[OffsetRange, ...]
    lost: bool = False


class RestoreReply(NamedTuple):
    """The number of messages that are delivered again, and ranges that are not
    retained.
    """

    restored: int
    lost: tuple[OffsetRange, ...] = ()


class _Found(NamedTuple):
    group: ConsumerGroup
    tp: TopicPartition
    position: GroupPosition


def _find(state: State, at: InboxPartition) -> _Found:
    group = find_group(state, at.group)
    topic = state.topics.get(at.topic)
    tp = TopicPartition(at.topic_id, at.partition)
    if topic is None or topic.topic_id != at.topic_id or tp not in group.positions:
        message = f"consumer group {at.group!r} does not read topic {at.topic!r} of id {tp[0]}"
        raise UnknownTopic(message, hint="the topic was deleted, or made again")
    if group.is_stopped(tp) and (tp in group.pending_resets or group.clone_progress is not None):
        raise Conflict(f"a reset of topic {at.topic!r} is under way", hint="wait for it")
    return _Found(group, tp, group.positions[tp])


def describe_inbox(state: State, at: InboxPartition) -> dict[str, Any]:
    """Describe what an inbox must have. `base` is null until a member has opened it;
    `settled` are ranges above the floor, `steps` the offsets where epochs begin.
    """
    group, tp, position = _find(state, at)
    topic, effects = state.topics_by_id[tp[0]], position.effects
    steps = epoch_steps(state, group, tp)
    return {
        "epoch": epoch_of(state, group, tp),
        "older": [FIRST_EPOCH, *(epoch for _offset, epoch in steps)],
        "steps": steps,
        "end": topic.end_offsets[tp[1]],
        "floor": position.floor,
        "settled": [item[:2] for item in position.settled],
        "base": None if effects is None else effects.base,
        "passed": [] if effects is None else [item[:2] for item in effects.passed],
    }


def decide_open(state: State, command: OpenInbox, _now: int) -> Outcome:
    group, tp, position = _find(state, command.at)
    if position.effects is not None:
        return Outcome()
    applied: RangeMap[None] = RangeMap((start, end, None) for start, end in command.applied)
    first = next(iter(applied), None)
    base = position.floor if first is None else min(position.floor, first.start)
    base = max(base, epoch_start(state, group, tp))  # effects below are those of older epochs
    without = RangeMap((*item[:2], None) for item in _settled(position, base))
    for start, end, _none in applied:
        without.cut(start, end)
    passed = tuple(item[:2] for item in without)
    return Outcome((InboxOpened(group.group_id, *tp, base, passed),))


def _settled(position: GroupPosition, base: int) -> Iterator[OffsetRange]:
    """Yield the settled offsets from `base` on."""
    if base < position.floor:
        yield base, position.floor
    for start, end, _none in position.settled.overlap(base, FAR):
        yield start, end


def decide_restore(state: State, command: RestoreEffects, _now: int) -> Outcome:
    found = _find(state, command.at)
    group, tp, _position = found
    lacking = _lacking(state, found, command.ranges)
    first = state.topics_by_id[tp[0]].start_offsets[tp[1]]
    lost = tuple(item[:2] for item in lacking.overlap(0, first))
    lacking.cut(0, first)
    again = tuple(item[:2] for item in lacking)
    reply = RestoreReply(sum(end - start for start, end in again), lost)
    if command.lost:
        passed = (EffectsPassed(group.group_id, *tp, lost),) if lost else ()
        return Outcome(passed, reply._replace(restored=0))
    if not again:
        return Outcome(reply=reply)
    return Outcome((EffectsRestored(group.group_id, *tp, again, group.generation + 1),), reply)


def _lacking(state: State, found: _Found, ranges: Iterable[OffsetRange]) -> RangeMap[None]:
    """Return those of the ranges whose effects the inbox must have."""
    group, tp, position = found
    lacking: RangeMap[None] = RangeMap()
    effects = position.effects
    if effects is None:
        return lacking
    settled = RangeMap((*item, None) for item in _settled(position, effects.base))
    for start, end in ranges:
        for item in settled.overlap(start, end):
            lacking.put(*item)
        for ref, _row in failed_messages.rows_between(state, group, tp, start, end):
            lacking.cut(ref[2], ref[2] + 1)
    for start, end, _none in effects.passed:
        lacking.cut(start, end)
    return lacking


def apply_opened(state: State, event: InboxOpened, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    tp = TopicPartition(event.topic_id, event.partition)
    effects = EffectsRecord(event.base)
    for start, end in event.passed:
        effects.pass_over(start, end)
    state.groups.position_for_update(group, tp).effects = effects


def apply_passed(state: State, event: EffectsPassed, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    tp = TopicPartition(event.topic_id, event.partition)
    for start, end in event.ranges:
        state.groups.position_for_update(group, tp).pass_over(start, end)


def apply_restored(state: State, event: EffectsRestored, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    tp = TopicPartition(event.topic_id, event.partition)
    position = state.groups.position_for_update(group, tp)
    if group.ordered:
        _restore_order(state, group, tp, event)
    for start, end in event.ranges:
        position.bring_back(start, end)
    group.update_suspects(tp)


def _restore_order(
    state: State, group: ConsumerGroup, tp: TopicPartition, event: EffectsRestored
) -> None:
    """Apply: end the leases of a partition, and put its failed messages back into their
    places, so that all of a key come in order. What an operator abandoned stays.
    """
    leases.return_range(state, group, tp, 0, group.positions[tp].cursor)
    first = event.ranges[0][0]
    for ref, row in failed_messages.rows_between(state, group, tp, first, FAR):
        if row.kind != FailedKind.ABANDONED and not row.token:
            failed_changes.remove(state, group, ref, "effect restored")
            leases.release_row(state, group, ref)
            key_fences.settle_head(state, group, ref, row.key_hash)
            if row.kind == FailedKind.LOCAL:
                local_stores.take_back(state, group, ref, row.store)
            group.positions[tp].bring_back(ref[2], ref[2] + 1)
    group.generation = max(group.generation, event.generation)
    group.resets[tp] = event.generation
    state.groups.dirty_groups.add(group.group_id)


DECIDERS: Deciders = {OpenInbox: decide_open, RestoreEffects: decide_restore}
APPLIERS: Appliers = {
    InboxOpened: apply_opened,
    EffectsPassed: apply_passed,
    EffectsRestored: apply_restored,
}
