"""Restores of the log from a backup, and the epochs that they begin.

A restore leaves the log's earlier incarnation at one position. What came later there is
unknown here, but inboxes know it: by topic id, partition, offset and epoch. The log
gives these offsets again. So each restore begins an epoch for all offsets from the ends
of the partitions on, and for whole partitions that are made later. No two restores
begin the same one, because it is the time of the restore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.model.topic_partition import FIRST_EPOCH

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup, EpochSteps
    from txmq.core.state.state import State
    from txmq.model.topic_partition import TopicPartition


def incarnation(state: State) -> bytes | None:
    """Return the id of the log's incarnation; None = the log was never restored."""
    return state.restores[-1].incarnation if state.restores else None


def newest_epoch(state: State, group: ConsumerGroup) -> int:
    """Return the newest epoch of a group, by a reset or a restore."""
    return max(group.epoch, state.restores[-1].epoch if state.restores else 0)


def epoch_of(state: State, group: ConsumerGroup, tp: TopicPartition) -> int:
    """Return the epoch of a partition's end, which the members' inboxes compare."""
    steps = epoch_steps(state, group, tp)
    return steps[-1][1] if steps else FIRST_EPOCH


def epoch_at(state: State, group: ConsumerGroup, tp: TopicPartition, offset: int) -> int:
    """Return the epoch of a message, as the members' inboxes know it."""
    steps = epoch_steps(state, group, tp)
    return next((epoch for first, epoch in reversed(steps) if offset >= first), FIRST_EPOCH)


def epoch_start(state: State, group: ConsumerGroup, tp: TopicPartition) -> int:
    """Return the offset from which on messages of a partition have that epoch."""
    steps = epoch_steps(state, group, tp)
    return steps[-1][0] if steps else 0


def all_epochs(state: State, group: ConsumerGroup, tp: TopicPartition) -> EpochSteps:
    """Return the offsets at which epochs of a partition begin, from offset 0 on."""
    steps = epoch_steps(state, group, tp)
    return steps if steps and not steps[0][0] else ((0, FIRST_EPOCH), *steps)


def is_lost(state: State, tp: TopicPartition, offset: int, epoch: int) -> bool:
    """Return whether the message of an earlier epoch at an offset is of a lost part, so
    that the log has another one there. `epoch` 0 = unknown, and then it may be.
    """
    return any(
        epoch < begun and offset >= (ends[tp[1]] if tp[1] < len(ends) else 0)
        for begun, ends in state.topics_by_id[tp[0]].ends_at_restore
    )


def epoch_steps(state: State, group: ConsumerGroup, tp: TopicPartition) -> EpochSteps:
    """Return the offsets of a partition at which epochs begin, by resets and restores.

    A later one takes the place of those at or above its offset.
    """
    own = group.epochs.get(tp, ())
    restored = state.topics_by_id[tp[0]].ends_at_restore
    if not restored:
        return own
    begun = [(epoch, ends[tp[1]] if tp[1] < len(ends) else 0) for epoch, ends in restored]
    steps: EpochSteps = ()
    for epoch, offset in sorted([*begun, *((epoch, offset) for offset, epoch in own)]):
        steps = (*(step for step in steps if step[0] < offset), (offset, epoch))
    return steps
