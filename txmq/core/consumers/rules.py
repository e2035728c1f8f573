"""The rules of consumers, gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.core.consumers import (
    acks,
    background_work,
    clones,
    delivery,
    failures,
    group_admin,
    leases,
    membership,
    resets,
)

if TYPE_CHECKING:
    from txmq.core.events.base import Booted, Place
    from txmq.core.state.consumer_groups import Group
    from txmq.core.state.state import State

RULES = (membership, group_admin, resets, clones, background_work, delivery, acks, leases, failures)

DECIDERS: dict[type, Any] = {
    command: rule for module in RULES for command, rule in module.DECIDERS.items()
}
APPLIERS: dict[type, Any] = {
    event: rule for module in RULES for event, rule in module.APPLIERS.items()
}


def apply_booted(state: State, event: Booted, place: Place) -> None:
    """Nobody is connected: whatever was leased is delivered again; reservations, fences
    and retries stay, and static members.
    """
    del event
    for group in list(state.consumers.by_id.values()):
        _forget_members(state, group, place)
        if group.temporary:
            background_work.delete(state, group)


def _forget_members(state: State, group: Group, place: Place) -> None:
    rows = sorted(group.held_rows)
    leases.put_back(state, group, ((*spotted, place.stored_at) for spotted in rows))
    for number in tuple(group.leases):
        leases.end(state, group, number)
    if group.members:
        group.members = {name: member for name, member in group.members.items() if member.static}
        group.generation += 1
        state.consumers.dirty_groups.add(group.group_id)
