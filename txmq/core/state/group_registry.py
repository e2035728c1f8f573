"""All consumer groups of a broker, by name and id, and the writing of their rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedList

from txmq.core.state.consumer_groups import (
    ConsumerGroup,
    Epochs,
    FenceState,
    KeyFence,
    MessageRef,
)
from txmq.core.state.positions import GroupPosition
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

COUNTERS_KEY = t.GROUP_KEY.pack(0)
FENCE_SINCE = 4  # index of `since` in a row of table `fences`


@dataclass(slots=True)
class GroupRegistry:
    """All consumer groups. `deleted` are those with rows that are still to be removed.
    `deadlines` holds (deadline, group id, lease number) of every lease. `past_epochs`
    are those of deleted groups whose messages were processed again, by name: the next
    group of that name goes on with them, because inboxes know groups by name.
    """

    by_name: dict[str, ConsumerGroup] = field(default_factory=dict)
    by_id: dict[int, ConsumerGroup] = field(default_factory=dict)
    deleted: dict[int, ConsumerGroup] = field(default_factory=dict)
    resetting: set[int] = field(default_factory=set)  # ids of groups with pending resets
    cloning: set[int] = field(default_factory=set)  # ids of clones in the making
    adopting: set[int] = field(default_factory=set)  # ids of groups that adopt a store
    next_group_id: int = 1
    past_epochs: dict[str, Epochs] = field(default_factory=dict)
    deadlines: Any = field(default_factory=SortedList)
    dirty_groups: set[int] = field(default_factory=set, compare=False)
    dirty_positions: set[tuple[int, int, int]] = field(default_factory=set, compare=False)
    dirty_fences: set[tuple[int, int, int]] = field(default_factory=set, compare=False)

    def add(self, group: ConsumerGroup) -> None:
        """Add a new group."""
        self.by_name[group.name] = self.by_id[group.group_id] = group
        self.past_epochs.pop(group.name, None)
        self.next_group_id = max(self.next_group_id, group.group_id + 1)
        self.dirty_groups.add(group.group_id)

    def mark_deleted(self, group: ConsumerGroup) -> None:
        """Free the name of a deleted group. Rows of its failed messages may be left."""
        if group.epochs_row and not group.temporary:
            self.past_epochs[group.name] = group.epochs_row
        del self.by_id[group.group_id], self.by_name[group.name]
        self.deleted[group.group_id] = group
        self.resetting.discard(group.group_id)
        self.adopting.discard(group.group_id)
        self.end_clone(group)
        group.deleted = True
        self.dirty_groups.add(group.group_id)

    def end_clone(self, group: ConsumerGroup) -> None:
        """End the cloning of a group: it goes on by itself."""
        if group.clone_progress is not None:
            self.by_id[group.clone_progress.source].unfinished_clones.discard(group.group_id)
            self.cloning.discard(group.group_id)
            self.dirty_groups.add(group.group_id)
            group.clone_progress = None

    def remove(self, group: ConsumerGroup) -> None:
        """Forget a deleted group when its last row is removed."""
        self.dirty_positions.update((group.group_id, *tp) for tp in group.positions)
        self.dirty_groups.add(group.group_id)
        del self.deleted[group.group_id]

    def begin_to_tidy(self, topic_id: int) -> None:
        """Apply: a topic was deleted. What groups have of it ends in steps, as in a
        reset.
        """
        for group in self.by_id.values():
            if (topic_id, 0) in group.positions:  # without it, no partition of the topic
                mine = [tp for tp in group.positions if tp[0] == topic_id]
                group.pending_resets.update(dict.fromkeys(mine, 0))
                self.resetting.add(group.group_id)
                self.dirty_groups.add(group.group_id)

    def _with_rows(self, group_id: int) -> ConsumerGroup:
        group = self.find(group_id)
        assert group is not None, "rows of a group come after its own"
        return group

    def find(self, group_id: int) -> ConsumerGroup | None:
        """Return a group that may be deleted, while it has rows."""
        return self.by_id.get(group_id) or self.deleted.get(group_id)

    def position_for_update(self, group: ConsumerGroup, tp: TopicPartition) -> GroupPosition:
        """Return the position of a group in a partition, and mark it dirty."""
        self.dirty_groups.add(group.group_id)
        self.dirty_positions.add((group.group_id, *tp))
        return group.positions[tp]

    def pass_over(self, group: ConsumerGroup, ref: MessageRef) -> None:
        """Apply: a failed message has ended without an effect."""
        topic_id, partition, offset = ref
        position = self.position_for_update(group, TopicPartition(topic_id, partition))
        position.pass_over(offset, offset + 1)

    def save(self, tables: t.Tables) -> None:
        """Write the rows of what has changed since the last call."""
        for group_id in self.dirty_groups:
            group = self.find(group_id)
            _write(
                tables[t.GROUPS],
                t.GROUP_KEY.pack(group_id),
                None if group is None else group.to_row(),
            )
        if self.dirty_groups:
            past = tuple(sorted(self.past_epochs.items()))
            tables[t.GROUPS].put(COUNTERS_KEY, (self.next_group_id, past))
        for group_id, *tp in self.dirty_positions:
            _write(
                tables[t.POSITIONS],
                t.POSITION_KEY.pack(group_id, *tp),
                self._position_row(group_id, *tp),
            )
        for group_id, topic_id, key_hash in self.dirty_fences:
            key = t.FENCE_KEY.pack(group_id, topic_id, key_hash + t.SIGN)
            _write(tables[t.FENCES], key, self._fence_row(group_id, topic_id, key_hash))
        for dirty in (self.dirty_groups, self.dirty_positions, self.dirty_fences):
            dirty.clear()

    def _position_row(self, group_id: int, topic_id: int, partition: int) -> t.Row | None:
        group = self.find(group_id)
        position = (
            None if group is None else group.positions.get(TopicPartition(topic_id, partition))
        )
        return None if position is None else position.to_row()

    def _fence_row(self, group_id: int, topic_id: int, key_hash: int) -> t.Row | None:
        group = self.find(group_id)
        fence = None if group is None else group.fence(topic_id, key_hash)
        if fence is None:
            return None
        return (
            int(fence.state),
            fence.partition,
            fence.offset,
            fence.first_lease,
            fence.since,
            fence.parked,
        )

    def load(self, tables: t.Tables) -> None:
        """Load the rows that `save` wrote."""
        for key, row in tables[t.GROUPS].range(b""):
            if key != COUNTERS_KEY:
                group = ConsumerGroup.from_row(t.GROUP_KEY.unpack(key)[0], row)
                if group.deleted:
                    self.deleted[group.group_id] = group
                else:
                    self._add_loaded(group)
        numbers: Any = tables[t.GROUPS].get(COUNTERS_KEY)
        if numbers is not None:
            self.next_group_id, past = numbers
            self.past_epochs = dict(past)
        for key, row in tables[t.POSITIONS].range(b""):
            group_id, topic_id, partition = t.POSITION_KEY.unpack(key)
            _restore(
                self._with_rows(group_id),
                TopicPartition(topic_id, partition),
                GroupPosition.from_row(row),
            )
        fence_row: Any
        for key, fence_row in sorted(tables[t.FENCES].range(b""), key=_fence_since):
            group_id, topic_id, shifted = t.FENCE_KEY.unpack(key)
            fence = KeyFence(FenceState(fence_row[0]), *fence_row[1:])
            self._with_rows(group_id).set_fence(topic_id, shifted - t.SIGN, fence)
        for group in self.by_id.values():
            self.deadlines.update(
                (lease.deadline, group.group_id, number) for number, lease in group.leases.items()
            )
            if group.clone_progress is not None:
                self.by_id[group.clone_progress.source].unfinished_clones.add(group.group_id)
                self.cloning.add(group.group_id)
        self.dirty_groups.clear()

    def _add_loaded(self, group: ConsumerGroup) -> None:
        self.add(group)
        if group.pending_resets:
            self.resetting.add(group.group_id)
        if any(store.adopted for store in group.stores.values()):
            self.adopting.add(group.group_id)


def _fence_since(item: tuple[bytes, Any]) -> int:
    return int(item[1][FENCE_SINCE])


def _write(table: t.Table, key: bytes, row: t.Row | None) -> None:
    if row is None:
        table.delete(key)
    else:
        table.put(key, row)


def _restore(group: ConsumerGroup, tp: TopicPartition, position: GroupPosition) -> None:
    group.positions[tp] = position
    for start, end, grant in position.leased:
        lease = group.leases[grant.lease]
        lease.remaining += end - start
        lease.partitions.add(tp)
    group.update_suspects(tp)
