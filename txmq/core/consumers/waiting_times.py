"""Times that consumer groups wait for, after the broker's time was set.

Leases end as late as before, so that no member loses its messages. Where the time was
set back, retries and probes come as late as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sortedcontainers import SortedList

from txmq.core.state import failed_changes
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.state import State


def set_back(state: State, back: int, now: int) -> None:
    """Apply: the time is `now`, and was later by `back`; negative = earlier."""
    for group in state.groups.by_id.values():
        for lease in group.leases.values():
            lease.granted_at -= back
            lease.deadline -= back
        group.failure_window.clear()
        if back > 0 and group.breaker is not None:
            since, probe_at = group.breaker.since, group.breaker.probe_at
            group.breaker = group.breaker._replace(since=min(since, now), probe_at=probe_at - back)
        state.groups.dirty_groups.add(group.group_id)
    state.groups.deadlines = SortedList(
        (lease.deadline, group.group_id, number)
        for group in state.groups.by_id.values()
        for number, lease in group.leases.items()
    )
    if back > 0:
        _set_retries_back(state, back, now)


def _set_retries_back(state: State, back: int, now: int) -> None:
    later = t.RETRY_TIME_KEY.pack(now + 1, 0, 0, 0, 0)
    for key, _row in list(state.tables[t.RETRIES_BY_TIME].range(later)):
        _due, group_id, *place = t.RETRY_TIME_KEY.unpack(key)
        group, ref = state.groups.by_id[group_id], (place[0], place[1], place[2])
        row = failed_changes.drop(state, group, ref)
        assert row is not None, "the index leads to the row"
        failed_changes.put(state, group, ref, row._replace(due=max(row.due - back, now)))
