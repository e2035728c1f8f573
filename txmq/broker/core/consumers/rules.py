"""The rules of consumers, gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.broker.core.consumers import acks, clones, delivery, group_admin, groups, leases, letters, resets, tidying

if TYPE_CHECKING:
    from txmq.broker.core.consumers.consumers import Group
    from txmq.broker.core.events import Booted, Place
    from txmq.broker.core.state import State

RULES = (groups, group_admin, resets, clones, tidying, delivery, acks, leases, letters)

DECIDERS: dict[type, Any] = {command: rule for module in RULES for command, rule in module.DECIDERS.items()}
APPLIERS: dict[type, Any] = {event: rule for module in RULES for event, rule in module.APPLIERS.items()}


def apply_booted(state: State, event: Booted, place: Place) -> None:
    """Nobody is connected: whatever was leased is delivered again; reservations, fences and retries stay, and static
    members.
    """
    del event
    for group in list(state.consumers.by_id.values()):
        _forget_members(state, group, place)
        if group.temporary:
            tidying.delete(state, group)


def _forget_members(state: State, group: Group, place: Place) -> None:
    rows = sorted(group.held_rows)
    leases.put_back(state, group, ((*spotted, place.stored_at) for spotted in rows))
    for number in tuple(group.leases):
        leases.end(state, group, number)
    if group.members:
        group.members = {name: member for name, member in group.members.items() if member.static}
        group.generation += 1
        state.consumers.dirty_groups.add(group.group_id)
