"""Due times read from the tables, for tests that move the clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from txmq.core.state.state import State
from txmq.store import tables as t


def due_checks(state: State, now: int, limit: int) -> Iterator[bytes]:
    """Yield the tokens of transactions whose check-back is due, longest due first."""
    rows = state.tables[t.DUE].range(t.DUE_KEY.pack(0, 0, 0), t.DUE_KEY.pack(now + 1, 0, 0))
    return islice((row[0] for key, row in rows if t.DUE_KEY.unpack(key)[1] == t.DUE_CHECK), limit)


def next_due(state: State, now: int) -> int | None:
    """Return the time of the next lease's end or due retry; None = there is neither."""
    deadlines = state.groups.deadlines
    rows = state.tables[t.RETRIES_BY_TIME].range(t.RETRY_TIME_KEY.pack(now + 1, 0, 0, 0, 0))
    times = [
        *(deadlines[0][:1] if deadlines else ()),
        *(t.RETRY_TIME_KEY.unpack(key)[0] for key, _row in islice(rows, 1)),
    ]
    return min(times, default=None)
