"""All consumer groups of a broker: found by name and number, written to their tables
when they have changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedList

from txmq.core.consumers import poison
from txmq.core.state.consumer_groups import Fence, FenceState, Group
from txmq.core.state.positions import Position
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import Spot

NUMBERS_KEY = t.GROUP_KEY.pack(0)
FENCE_SINCE = 4  # place in a row of table `fences`


@dataclass(slots=True)
class Consumers:
    """All consumer groups, `doomed` ones apart. `deadlines` holds (deadline, group id,
    lease) of every lease.
    """

    groups: dict[str, Group] = field(default_factory=dict)
    by_id: dict[int, Group] = field(default_factory=dict)
    doomed: dict[int, Group] = field(
        default_factory=dict
    )  # deleted groups with rows that are yet to go
    resetting: set[int] = field(default_factory=set)  # groups with resets that take a while
    cloning: set[int] = field(default_factory=set)  # groups that are being made from others
    next_group_id: int = 1
    deadlines: Any = field(default_factory=SortedList)
    dirty_groups: set[int] = field(default_factory=set, compare=False)
    dirty_positions: set[tuple[int, int, int]] = field(default_factory=set, compare=False)
    dirty_fences: set[tuple[int, int, int]] = field(default_factory=set, compare=False)

    def add(self, group: Group) -> None:
        """A group came to be."""
        self.groups[group.name] = self.by_id[group.group_id] = group
        self.next_group_id = max(self.next_group_id, group.group_id + 1)
        self.dirty_groups.add(group.group_id)

    def doom(self, group: Group) -> None:
        """A group is deleted, and its name is free; rows of its moved messages may be
        left.
        """
        del self.by_id[group.group_id], self.groups[group.name]
        self.doomed[group.group_id] = group
        self.resetting.discard(group.group_id)
        self.cloned(group)
        group.doomed = True
        self.dirty_groups.add(group.group_id)

    def cloned(self, group: Group) -> None:
        """A group is no longer being made from another one."""
        if group.cloning is not None:
            self.by_id[group.cloning.source].clones.discard(group.group_id)
            self.cloning.discard(group.group_id)
            self.dirty_groups.add(group.group_id)
            group.cloning = None

    def forget(self, group: Group) -> None:
        """Nothing is left of a doomed group."""
        self.dirty_positions.update((group.group_id, *spot) for spot in group.positions)
        self.dirty_groups.add(group.group_id)
        del self.doomed[group.group_id]

    def _known(self, group_id: int) -> Group:
        group = self._find(group_id)
        assert group is not None, "it has rows, so it has one of its own"
        return group

    def _find(self, group_id: int) -> Group | None:
        return self.by_id.get(group_id) or self.doomed.get(group_id)

    def touch(self, group: Group, spot: Spot) -> Position:
        """The group's position in a partition, which is about to change."""
        self.dirty_groups.add(group.group_id)
        self.dirty_positions.add((group.group_id, *spot))
        return group.positions[spot]

    def save(self, tables: t.Tables) -> None:
        """Write what changed since the last call."""
        for group_id in self.dirty_groups:
            group = self._find(group_id)
            _write(
                tables[t.GROUPS],
                t.GROUP_KEY.pack(group_id),
                None if group is None else group.to_row(),
            )
        if self.dirty_groups:
            tables[t.GROUPS].put(NUMBERS_KEY, (self.next_group_id,))
        for group_id, *spot in self.dirty_positions:
            _write(
                tables[t.POSITIONS],
                t.POSITION_KEY.pack(group_id, *spot),
                self._position_row(group_id, *spot),
            )
        for group_id, topic_id, key_hash in self.dirty_fences:
            key = t.FENCE_KEY.pack(group_id, topic_id, key_hash + t.SIGN)
            _write(tables[t.FENCES], key, self._fence_row(group_id, topic_id, key_hash))
        for dirty in (self.dirty_groups, self.dirty_positions, self.dirty_fences):
            dirty.clear()

    def _position_row(self, group_id: int, topic_id: int, partition: int) -> t.Row | None:
        group = self._find(group_id)
        position = None if group is None else group.positions.get((topic_id, partition))
        return None if position is None else position.to_row()

    def _fence_row(self, group_id: int, topic_id: int, key_hash: int) -> t.Row | None:
        group = self._find(group_id)
        fence = None if group is None else group.fence(topic_id, key_hash)
        if fence is None:
            return None
        return (
            int(fence.state),
            fence.partition,
            fence.offset,
            fence.born,
            fence.since,
            fence.parked,
        )

    def load(self, tables: t.Tables) -> None:
        """Take over what `save` wrote."""
        for key, row in tables[t.GROUPS].range(b""):
            if key != NUMBERS_KEY:
                group = Group.from_row(t.GROUP_KEY.unpack(key)[0], row)
                if group.doomed:
                    self.doomed[group.group_id] = group
                else:
                    self.add(group)
                if group.resets and not group.doomed:
                    self.resetting.add(group.group_id)
        numbers: Any = tables[t.GROUPS].get(NUMBERS_KEY)
        if numbers is not None:
            (self.next_group_id,) = numbers
        for key, row in tables[t.POSITIONS].range(b""):
            group_id, topic_id, partition = t.POSITION_KEY.unpack(key)
            _restore(self._known(group_id), (topic_id, partition), Position.from_row(row))
        fence_row: Any
        for key, fence_row in sorted(tables[t.FENCES].range(b""), key=_since):
            group_id, topic_id, shifted = t.FENCE_KEY.unpack(key)
            fence = Fence(FenceState(fence_row[0]), *fence_row[1:])
            self._known(group_id).set_fence(topic_id, shifted - t.SIGN, fence)
        for group in self.by_id.values():
            self.deadlines.update(
                (lease.deadline, group.group_id, number) for number, lease in group.leases.items()
            )
            if group.cloning is not None:
                self.by_id[group.cloning.source].clones.add(group.group_id)
                self.cloning.add(group.group_id)
        self.dirty_groups.clear()


def _since(item: tuple[bytes, Any]) -> int:
    """Of a row of table `fences`."""
    return int(item[1][FENCE_SINCE])


def _write(table: t.Table, key: bytes, row: t.Row | None) -> None:
    if row is None:
        table.delete(key)
    else:
        table.put(key, row)


def _restore(group: Group, spot: Spot, position: Position) -> None:
    group.positions[spot] = position
    for start, end, grant in position.leased:
        lease = group.leases[grant.lease]
        lease.left += end - start
        lease.spots.add(spot)
    poison.note(group, spot)
