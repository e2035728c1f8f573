"""Changes of consumer groups at a start of the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.consumers import background_work, leases
from txmq.core.state import local_stores

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.state import State


def apply_booted(state: State, context: RecordContext) -> None:
    """Apply: no client is connected after a start, so redeliver everything that is
    leased.

    Reservations, fences, retries and static members stay.
    """
    for group in list(state.groups.by_id.values()):
        _reset_members(state, group, context)
        if group.temporary:
            background_work.delete(state, group)


def _reset_members(state: State, group: ConsumerGroup, context: RecordContext) -> None:
    rows = sorted(group.leased_rows)
    leases.return_rows(state, group, ((*ref, context.stored_at) for ref in rows))
    for number in tuple(group.leases):
        leases.end(state, group, number)
    if group.members:
        group.members = {name: member for name, member in group.members.items() if member.static}
        group.generation += 1
        state.groups.dirty_groups.add(group.group_id)
    local_stores.note_losses(state, group, context.stored_at)
