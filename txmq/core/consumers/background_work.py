"""Background work on groups: deletion, of a group or of a topic that it reads, large
resets, large clones and the adoption of consumers' stores, in bounded steps.

There may be a million failed messages, and each record has to be applied quickly.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import key_fences, leases, letter_notes
from txmq.core.consumers.commands import AdvanceGroupWork, DeleteGroup
from txmq.core.consumers.group_settings import with_members
from txmq.core.events.consumers import (
    BroughtBack,
    CloneContinued,
    CloneEnded,
    GroupDeleted,
    GroupTidied,
    PositionReset,
    StoreMessagesAdopted,
    TopicTidied,
)
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, failed_messages, local_stores
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.state import State
from txmq.errors import Conflict
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import Event, RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup

STEP_ROWS = 250  # changed by one record


class GroupWorkReply(NamedTuple):
    """Reply with `more` = True if work is left."""

    more: bool


def decide_delete(state: State, command: DeleteGroup, _now: int) -> Outcome:
    found = with_members(state, command.group)
    members = [name for group in found for name in group.members]
    if members:
        message = f"consumer group {command.group!r} has members: {', '.join(members[:3])}"
        raise Conflict(message, hint="stop the members first")
    if any(group.unfinished_clones for group in found):
        message = f"consumer group {command.group!r} is being cloned"
        raise Conflict(
            message,
            hint="wait until the clone is complete (txmq group show), or delete the clone first",
        )
    return Outcome(
        tuple(GroupDeleted(group.group_id, command.by, STEP_ROWS) for group in reversed(found))
    )


def decide_advance(state: State, _command: AdvanceGroupWork, _now: int) -> Outcome:
    deleted = next(iter(state.groups.deleted), None)
    if deleted is not None:
        return Outcome((GroupTidied(deleted, STEP_ROWS),), GroupWorkReply(more=True))
    groups = state.groups
    resetting, cloning, adopting = (
        min(some, default=0) for some in (groups.resetting, groups.cloning, groups.adopting)
    )
    if resetting:
        return Outcome(
            (_next_of_reset(state, state.groups.by_id[resetting]),), GroupWorkReply(more=True)
        )
    if cloning:
        return Outcome(
            (_next_of_clone(state, state.groups.by_id[cloning]),), GroupWorkReply(more=True)
        )
    if adopting:
        stores = groups.by_id[adopting].stores
        store_id = next(store_id for store_id, store in stores.items() if store.adopted)
        event = StoreMessagesAdopted(adopting, store_id, STEP_ROWS)
        return Outcome((event,), GroupWorkReply(more=True))
    return Outcome(reply=GroupWorkReply(more=False))


def _next_of_reset(state: State, group: ConsumerGroup) -> Event:
    """Return the next step of a reset: restore rows, or finish one topic. Of a deleted
    topic, end what the group has.
    """
    topic_id = next(iter(group.pending_resets))[0]
    if state.topics_by_id[topic_id].deleted:
        return TopicTidied(group.group_id, topic_id, STEP_ROWS)
    offsets = {tp[1]: offset for tp, offset in group.pending_resets.items() if tp[0] == topic_id}
    for partition, offset in offsets.items():
        if failed_messages.rows_between(
            state, group, TopicPartition(topic_id, partition), offset, t.SIGN, 1
        ):
            return BroughtBack(group.group_id, topic_id, partition, offset, STEP_ROWS)
    # Retention may have deleted messages since the reset began.
    firsts = state.topics_by_id[topic_id].start_offsets
    new_offsets = tuple(
        (partition, max(offset, firsts[partition])) for partition, offset in sorted(offsets.items())
    )
    return PositionReset(group.group_id, topic_id, new_offsets, group.epoch, "", generation=0)


def _next_of_clone(state: State, clone: ConsumerGroup) -> Event:
    assert clone.clone_progress is not None, "it is being made"
    source, start = clone.clone_progress
    left = failed_messages.messages_of_group(state, state.groups.by_id[source], 1, start)
    return CloneContinued(clone.group_id, STEP_ROWS) if left else CloneEnded(clone.group_id)


def restore_rows(
    state: State, group: ConsumerGroup, tp: TopicPartition, offset: int, most: int | None = None
) -> None:
    """Apply: put failed messages of a partition, from `offset` on, back into their
    places.
    """
    for ref, row in failed_messages.rows_between(state, group, tp, offset, t.SIGN, most):
        failed_changes.remove(state, group, ref, "reset")
        leases.release_row(state, group, ref)
        key_fences.settle_head(state, group, ref, row.key_hash)
        if row.kind == FailedKind.LOCAL:
            local_stores.take_back(state, group, ref, row.store)


def delete(state: State, group: ConsumerGroup, most: int = STEP_ROWS) -> None:
    """Apply: delete a group, with at most so many of its rows and fences."""
    for number in tuple(group.leases):
        leases.end(state, group, number)
    state.groups.mark_deleted(group)
    state.plans.cancel_of_group(group.group_id, state.stored_at)
    _delete_step(state, group, most)


def _delete_step(state: State, group: ConsumerGroup, most: int) -> None:
    rows = failed_messages.messages_of_group(state, group, most)
    for ref in rows:
        failed_changes.remove(state, group, ref, "group deleted")
        leases.release_row(state, group, ref)
    left = most - len(rows)
    for store_id in list(group.stores):
        left -= local_stores.drop_orders(state, group, store_id, left)
    fences = ((topic_id, key_hash) for topic_id, key_hash, _fence in group.all_fences())
    _lift(state, group, list(islice(fences, left)))
    if left > 0 and not group.fences:
        for tp in group.positions:
            state.tables[t.MISSED].delete(t.POSITION_KEY.pack(group.group_id, *tp))
        letter_notes.forget_notes(state, group)
        state.tables[t.POLICIES].delete(t.GROUP_KEY.pack(group.group_id))
        state.groups.remove(group)


def _lift(state: State, group: ConsumerGroup, fences: list[tuple[int, int]]) -> None:
    """Apply: remove fences, whatever waits behind them."""
    for topic_id, key_hash in fences:
        group.set_fence(topic_id, key_hash, None)
        state.groups.dirty_fences.add((group.group_id, topic_id, key_hash))


def apply_topic_step(state: State, event: TopicTidied, _context: RecordContext) -> None:
    """Apply: first lift fences, so that none is without its head, then end messages."""
    group, topic_id = state.groups.by_id[event.group_id], event.topic_id
    fences = [(topic_id, key) for key in islice(group.fences.get(topic_id, ()), event.most)]
    _lift(state, group, fences)
    left = event.most - len(fences)
    rows = failed_messages.messages_of_topic(state, group, topic_id, left)
    for ref in rows:
        row = failed_changes.remove(state, group, ref, "its topic was deleted")
        leases.release_row(state, group, ref)
        if row is not None and row.store:
            local_stores.drop_order(state, group, row.store, ref)
            local_stores.forget_if_idle(state, group, row.store)
    if len(rows) < left:
        group.paused_topics.discard(topic_id)
        ends = state.topics_by_id[topic_id].end_offsets
        for tp in [tp for tp in group.positions if tp[0] == topic_id]:
            group.stops.pop(tp, None)
            go_on_at(state, group, tp, ends[tp[1]])


def go_on_at(state: State, group: ConsumerGroup, tp: TopicPartition, offset: int) -> None:
    """Apply: go on at an offset of a partition without failed messages there. Whatever
    was delivered before is nobody's any more, and its pending reset is complete.
    """
    leases.release_range(state, group, tp, 0, group.positions[tp].cursor)
    group.positions[tp].move_to(offset)
    group.suspect_partitions.discard(tp)
    group.pending_resets.pop(tp, None)
    if not group.pending_resets:
        state.groups.resetting.discard(group.group_id)


def apply_deleted(state: State, event: GroupDeleted, _context: RecordContext) -> None:
    delete(state, state.groups.by_id[event.group_id], event.most)


def apply_delete_step(state: State, event: GroupTidied, _context: RecordContext) -> None:
    _delete_step(state, state.groups.deleted[event.group_id], event.most)


def apply_restored(state: State, event: BroughtBack, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    restore_rows(
        state, group, TopicPartition(event.topic_id, event.partition), event.offset, event.most
    )


DECIDERS: Deciders = {DeleteGroup: decide_delete, AdvanceGroupWork: decide_advance}
APPLIERS: Appliers = {
    GroupDeleted: apply_deleted,
    GroupTidied: apply_delete_step,
    BroughtBack: apply_restored,
    TopicTidied: apply_topic_step,
}
