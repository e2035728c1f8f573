"""Growth of topics: a key's partition may change, and the order of its messages must
not.

What was published before a topic grew lies below the ends that its partitions had then.
An ordered group gets nothing from there on, whatever the partition, before all of that
is done with or has moved: moved messages are found by their key, and keep it fenced
wherever it goes on. No transaction holds keys of a topic when it grows, so nothing that
is ordered by them comes later into partitions that were its key's before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import Group, Spot
    from txmq.core.state.state import State


def limit(state: State, group: Group, spot: Spot) -> int | None:
    """The offset that an ordered group's deliveries of a partition must stop before for
    now; None = there is none.
    """
    topic_id, partition = spot
    for ends in state.topics_by_id[topic_id].growths:
        if not _done(group, topic_id, ends):
            return ends[partition] if partition < len(ends) else 0
    return None


def _done(group: Group, topic_id: int, ends: tuple[int, ...]) -> bool:
    positions = (group.positions.get((topic_id, partition)) for partition in range(len(ends)))
    return all(
        position is None or position.floor >= end
        for position, end in zip(positions, ends, strict=True)
    )
