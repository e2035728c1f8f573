"""Who may speak for a consumer group: look-ups shared by all rules of consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.state.ranges import Piece, RangeMap, gaps
from txmq.core.state.state import Rejected
from txmq.errors import StaleGeneration, UnknownGroup, UnknownMember

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.state.consumer_groups import Group, Member, Spot, Spotted
    from txmq.core.state.state import State


def known(state: State, name: str) -> Group | Rejected:
    """The group of that name."""
    group = state.consumers.groups.get(name)
    if group is None:
        return Rejected(
            UnknownGroup,
            f"there is no consumer group {name!r}",
            "it is made when its first member joins",
        )
    return group


def active(state: State, name: str, member: str) -> tuple[Group, Member] | Rejected:
    """The group and its member."""
    group = known(state, name)
    if isinstance(group, Rejected):
        return group
    found = group.members.get(member)
    if found is None:
        message = f"{member!r} is no member of consumer group {name!r}, or no longer"
        return Rejected(
            UnknownMember, message, "join again; what was leased to it is delivered to others"
        )
    return group, found


def current(
    state: State, name: str, member: str, generation: int
) -> tuple[Group, Member] | Rejected:
    """The group and its member, which must know the present generation: its partitions
    may have changed.
    """
    found = active(state, name, member)
    if isinstance(found, Rejected) or found[0].generation == generation:
        return found
    now = found[0].generation
    message = f"generation {generation} of consumer group {name!r} is over, it is {now}"
    return Rejected(
        StaleGeneration, message, "join again to learn the new assignment", {"generation": now}
    )


class Claim:
    """Sorts the messages that a member speaks of: what is leased to it, and what is not
    (any more).

    The lease decides, not the assignment: after a rebalance a member may still finish
    what it has. A member speaks only for leases of the generation it says it is in, or
    older ones; so an earlier process of the same name speaks for none.
    """

    def __init__(self, group: Group, member: str, generation: int) -> None:
        self._group, self._member, self._generation = group, member, generation
        self._ranges: dict[Spot, RangeMap[None]] = {}
        self.rows: dict[Spotted, None] = {}  # of table `moved`
        self.stale: list[tuple[str, int, int, int]] = []

    def add(self, state: State, topic: str, partition: int, start: int, end: int) -> None:
        """One range."""
        found = state.topics.get(topic)
        spot = (found.topic_id if found is not None else 0, partition)
        position = self._group.positions.get(spot)
        if position is None:
            self.stale.append((topic, partition, start, end))
            return
        mine = self._ranges.setdefault(spot, RangeMap())
        owned = []
        for low, high, grant in position.leased.overlap(start, end):
            if self._is_mine(grant.lease):
                mine.put(low, high, None)
                owned.append(Piece(low, high, None))
        if len(owned) == 1 and owned[0].end - owned[0].start == end - start:
            return
        rows = self._held_rows(spot, start, end)
        self.rows.update(dict.fromkeys(rows))
        owned += [Piece(row[2], row[2] + 1, None) for row in rows]
        owned.sort(key=lambda piece: piece.start)
        self.stale += [(topic, partition, low, high) for low, high in gaps(owned, start, end)]

    def _is_mine(self, number: int) -> bool:
        lease = self._group.leases[number]
        return (
            lease.member == self._member
            and lease.generation <= self._generation <= self._group.generation
        )

    def _held_rows(self, spot: Spot, start: int, end: int) -> list[Spotted]:
        held = self._group.held_rows
        if end - start == 1:
            asked: Iterable[Spotted] = ((*spot, start),)
        else:
            asked = [row for row in held if row[:2] == spot and start <= row[2] < end]
        return [row for row in asked if row in held and self._is_mine(held[row])]

    @property
    def ranges(self) -> tuple[tuple[int, int, int, int], ...]:
        """What is leased to the member, neighbours joined: (topic id, partition, start,
        end).
        """
        return tuple(
            (*spot, start, end) for spot, mine in self._ranges.items() for start, end, _none in mine
        )
