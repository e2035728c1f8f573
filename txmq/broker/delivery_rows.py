"""What becomes of the batches that were read for a delivery: whose rows may go out, and
which batches hold them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING

from txmq.batch import BatchView, expires, key_hashes
from txmq.core.consumers.commands import Pick
from txmq.model.message import at_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.core.consumers.candidates import Candidate
    from txmq.core.consumers.delivery import Delivery
    from txmq.store.tables import Entry

NOTHING: frozenset[int] = frozenset()

Batches = list[bytes]  # of one candidate; none where it is not wanted


def covered(
    delivery: Delivery, candidate: Candidate, batches: Batches
) -> tuple[int, Sequence[Entry], Sequence[bytes]]:
    """The offset of the first batch that has rows of the delivery; these batches, as
    stored and as read.
    """
    entries = candidate.batches
    if len(entries) == 1:
        return candidate.base_offset, entries, batches
    bases = list(accumulate((entry.count for entry in entries), initial=candidate.base_offset))
    low, high = bisect_right(bases, delivery.start) - 1, bisect_left(bases, delivery.end)
    return bases[low], entries[low:high], batches[low:high]


def pick(candidate: Candidate, batches: Batches, now: int) -> Pick:
    """A candidate with what only its batches tell."""
    keys = _keys(candidate, *batches) if candidate.needs_keys else None
    return Pick(
        candidate,
        keys,
        _expired(candidate, batches, now) if any(map(expires, batches)) else NOTHING,
    )


def _expired(candidate: Candidate, batches: Batches, now: int) -> frozenset[int]:
    """The offsets of messages whose time to live is over; a span of it counts from when
    they could be delivered.
    """
    ends = chain.from_iterable(
        [at_time(carried, entry.stored_at) for carried in BatchView(batch).expire_at]
        for entry, batch in zip(candidate.batches, batches, strict=True)
    )
    times = enumerate(
        islice(ends, candidate.first_row, candidate.first_row + candidate.rows), candidate.start
    )
    return frozenset(offset for offset, end in times if 0 < end <= now)


def _keys(candidate: Candidate, batch: bytes) -> tuple[int | None, ...]:
    hashes = key_hashes(batch)
    return tuple(hashes[candidate.first_row : candidate.first_row + candidate.rows])
