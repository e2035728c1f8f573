"""Bundles that are stored for undecided jobs: they hold no keys before the decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from txmq.model.bundle import BundleState
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.state import State

# Places in a row of table `transactions`, and of its field about a large bundle.
STATE: Final = 0
BATCHES: Final = 8
LARGE: Final = 19
PARTITIONS: Final = 1


def job_writes_to(state: State, topic_id: int) -> bool:
    """Return whether a stored bundle of an undecided job writes to a topic."""
    for key, _row in state.tables[t.JOB_PARTS].range(b""):
        row: Any = state.transactions.get(t.JOB_PART_KEY.unpack(key)[1])
        if row is None or row[STATE] != BundleState.UNDECIDED:
            continue
        places = row[BATCHES] if row[LARGE] is None else row[LARGE][PARTITIONS]
        if any(place[0] == topic_id for place in places):
            return True
    return False
