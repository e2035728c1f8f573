"""Bundles that are stored and undecided: which topics they write to.

Those for undecided jobs, and those of messages without keys, hold no keys.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from txmq.errors import Conflict
from txmq.model.bundle import BundleState
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.state import State

# Places in a row of table `transactions`, and of its field about a large bundle.
STATE: Final = 0
BATCHES: Final = 8
LARGE: Final = 19
PARTITIONS: Final = 1
MAX_SEARCHED: Final = 10_000  # undecided transactions, in one decision


def job_writes_to(state: State, topic_id: int) -> bool:
    """Return whether a stored bundle of an undecided job writes to a topic."""
    for key, _row in state.tables[t.JOB_PARTS].range(b""):
        row: Any = state.transactions.get(t.JOB_PART_KEY.unpack(key)[1])
        if row is None or row[STATE] != BundleState.UNDECIDED:
            continue
        if _writes_to(row, topic_id):
            return True
    return False


def check_none_writes_to(state: State, topic_id: int) -> None:
    """Refuse to delete a topic to which an undecided transaction writes, also where
    there are too many to see that none does.
    """
    if state.undecided > MAX_SEARCHED:
        raise Conflict(
            f"{state.undecided} transactions are undecided, and one may write to the topic",
            hint=f"delete it when fewer than {MAX_SEARCHED} are: txmq tx list",
        )
    for _key, row in islice(state.tables[t.UNDECIDED].range(b""), MAX_SEARCHED):
        token: Any = row[0]
        found: Any = state.transactions.get(token)
        if found is not None and _writes_to(found, topic_id):
            raise Conflict(
                f"the undecided transaction {token.hex()} writes to the topic",
                hint=f"wait for its decision, or decide it: txmq tx show {token.hex()}",
            )


def _writes_to(row: Any, topic_id: int) -> bool:  # noqa: ANN401  # read back, a plain tuple
    places = row[BATCHES] if row[LARGE] is None else row[LARGE][PARTITIONS]
    return any(place[0] == topic_id for place in places)
