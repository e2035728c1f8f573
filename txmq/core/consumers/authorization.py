"""Authorization of consumers: look-ups of groups and members, and claims on leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.state.ranges import RangeMap, ValueRange, gaps
from txmq.errors import StaleGeneration, UnknownGroup, UnknownMember
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.state.consumer_groups import ConsumerGroup, GroupMember, MessageRef
    from txmq.core.state.state import State


def find_group(state: State, name: str) -> ConsumerGroup:
    """Return the group with this name."""
    group = state.groups.by_name.get(name)
    if group is None:
        raise UnknownGroup(
            f"there is no consumer group {name!r}",
            hint="see the groups: txmq group list; a group is created when its first member joins",
        )
    return group


JOIN_AGAIN = "join again; messages that were leased to it go to other members"


def find_member(
    state: State, name: str, member: str, hint: str = JOIN_AGAIN
) -> tuple[ConsumerGroup, GroupMember]:
    """Return the group and its member."""
    group = find_group(state, name)
    found = group.members.get(member)
    if found is None:
        message = f"{member!r} is not a member of consumer group {name!r}"
        raise UnknownMember(message, hint=hint)
    return group, found


def find_instance(
    state: State, name: str, member: str, instance: str
) -> tuple[ConsumerGroup, GroupMember]:
    """Return the group and its member, unless another process has replaced it."""
    found = find_member(state, name, member)
    if found[1].instance != instance:
        message = f"another process has joined consumer group {name!r} as {member!r}"
        hint = "give each process a name of its own"
        raise UnknownMember(message, hint=hint, detail={"replaced": True})
    return found


def find_current_member(
    state: State, name: str, member: str, generation: int
) -> tuple[ConsumerGroup, GroupMember]:
    """Return the group and its member, if the member knows the current generation.

    With an older generation its assignment may be out of date.
    """
    found = find_member(state, name, member)
    if found[0].generation == generation:
        return found
    now = found[0].generation
    message = (
        f"generation {generation} of consumer group {name!r} is over: the current one is {now}"
    )
    raise StaleGeneration(
        message, hint="join again to get the new assignment", detail={"generation": now}
    )


class LeaseClaim:
    """Messages that a member names, sorted by its claim to them.

    `ranges` and `rows` are leased to the member, `stale` ranges are not. The lease
    decides, not the assignment: after a rebalance a member may still finish
    its messages. A member has a claim only to leases of the generation it names, or of
    older ones. So an earlier process with the same name has none.
    """

    def __init__(self, group: ConsumerGroup, member: str, generation: int) -> None:
        self._group, self._member, self._generation = group, member, generation
        self._ranges: dict[TopicPartition, RangeMap[None]] = {}
        self.rows: dict[MessageRef, None] = {}  # failed messages
        self.stale: list[tuple[str, int, int, int]] = []

    def add(self, state: State, topic: str, partition: int, start: int, end: int) -> None:
        """Add one range to the claim."""
        found = state.topics.get(topic)
        tp = TopicPartition(found.topic_id if found is not None else 0, partition)
        position = self._group.positions.get(tp)
        if position is None:
            self.stale.append((topic, partition, start, end))
            return
        own = self._ranges.setdefault(tp, RangeMap())
        owned = []
        for low, high, grant in position.leased.overlap(start, end):
            if self._is_own(grant.lease):
                own.put(low, high, None)
                owned.append(ValueRange(low, high, None))
        if len(owned) == 1 and owned[0].end - owned[0].start == end - start:
            return
        rows = self._held_rows(tp, start, end)
        self.rows.update(dict.fromkeys(rows))
        owned += [ValueRange(row[2], row[2] + 1, None) for row in rows]
        owned.sort(key=lambda owned_range: owned_range.start)
        self.stale += [(topic, partition, low, high) for low, high in gaps(owned, start, end)]

    def _is_own(self, number: int) -> bool:
        lease = self._group.leases[number]
        return (
            lease.member == self._member
            and lease.generation <= self._generation <= self._group.generation
        )

    def _held_rows(self, tp: TopicPartition, start: int, end: int) -> list[MessageRef]:
        held = self._group.leased_rows
        if end - start <= len(held):
            claimed: Iterable[MessageRef] = [(*tp, offset) for offset in range(start, end)]
        else:
            claimed = [row for row in held if row[:2] == tp and start <= row[2] < end]
        return [row for row in claimed if row in held and self._is_own(held[row])]

    @property
    def ranges(self) -> tuple[tuple[int, int, int, int], ...]:
        """Claimed ranges, neighbours joined: (topic id, partition, start, end)."""
        return tuple(
            (*tp, start, end) for tp, own in self._ranges.items() for start, end, _none in own
        )
