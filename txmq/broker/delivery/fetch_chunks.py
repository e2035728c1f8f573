"""Parts of batches in a FETCH reply: whole ones, rows cut out of them, and runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING

from txmq.batch import BatchView, cut_rows, read_header
from txmq.core.consumers.candidates import SINGLE_ROW_BYTES, Candidate, CandidateSource
from txmq.wire.chunks import ACCEPTED, REDELIVERY, SUSPECT, Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.core.consumers.delivery import DeliveredRange
    from txmq.store.tables import BatchEntry

Batches = list[bytes]  # of one candidate; none where the member does not want it
# what the chunks of a run have in common
_ALIKE = attrgetter("topic", "partition", "attempt", "flags", "lease_id")


class BatchParts:
    """The rows to send of batches of one reply. Each is read and cut once."""

    def __init__(self) -> None:
        self._views: dict[int, BatchView] = {}  # by position
        self._parts: dict[tuple[int, int, int], bytes] = {}

    def get(
        self, candidate: Candidate, position: int, batch: bytes, first: int, rows: int
    ) -> bytes:
        """Return the batch to send for some of its rows: these rows alone, if there is
        one, or if they have failed before and are less than half of a large batch.
        """
        wanted = rows == 1 or candidate.source is CandidateSource.FAILED
        if len(batch) <= SINGLE_ROW_BYTES or not wanted:
            return batch
        if (part := self._parts.get((position, first, rows))) is not None:
            return part
        view = self._views.get(position)
        if view is None:
            view = self._views[position] = BatchView(batch)
        whole = len(view) == 1 or (rows > 1 and 2 * rows >= len(view))
        part = batch if whole else cut_rows(batch, first, rows, view)
        self._parts[position, first, rows] = part
        return part


def chunk_of(
    delivery: DeliveredRange,
    lease: int,
    candidate: Candidate,
    batches: Batches,
    topic: str,
    parts: BatchParts,
) -> Chunk:
    """Return the chunk of a delivery: its rows in as few bytes as they need."""
    rows = delivery.end - delivery.start
    flags = REDELIVERY if candidate.source is CandidateSource.FAILED else 0
    flags |= SUSPECT if candidate.deaths else 0
    flags |= ACCEPTED if delivery.accepted else 0
    base, (stored, *others), (batch, *more) = _batches_of(delivery, candidate, batches)
    first = delivery.start - base
    if not more:
        part = parts.get(candidate, stored.position, batch, first, rows)
        if part is not batch:
            batch, base, first = part, delivery.start, 0
    further = tuple([(entry.length, entry.count, entry.stored_at) for entry in others])
    return Chunk(
        topic,
        candidate.partition,
        base,
        stored.stored_at,
        stored.position,
        delivery.attempt,
        flags,
        lease,
        first,
        rows,
        b"".join((batch, *more)) if more else batch,
        further,
    )


def join_chunks(chunks: list[Chunk], most: int) -> list[Chunk]:
    """Return chunks of messages that had failed before, neighbours joined to runs of at
    most so many rows.
    """
    joined: list[Chunk] = []
    run: list[Chunk] = []
    end = rows = 0  # of the run: offset behind its batches, number of its rows
    for chunk in chunks:
        if not (
            run
            and (chunk.base_offset, chunk.first_row) == (end, 0)
            and _ALIKE(chunk) == _ALIKE(run[0])
            and chunk.flags & REDELIVERY
            and rows + chunk.rows <= most
        ):
            joined += _run_of(run)
            run, rows = [], 0
        run.append(chunk)
        rows += chunk.rows
        whole = chunk.first_row + chunk.rows == read_header(chunk.batch).count
        end = chunk.base_offset + chunk.first_row + chunk.rows if whole else -1
    return [*joined, *_run_of(run)]


def _run_of(chunks: list[Chunk]) -> list[Chunk]:
    """Return neighbouring chunks of a batch each as one chunk."""
    if len(chunks) < 2:
        return chunks
    first, *others = chunks
    further = tuple(
        (len(chunk.batch), read_header(chunk.batch).count, chunk.stored_at) for chunk in others
    )
    batch = b"".join(chunk.batch for chunk in chunks)
    rows = sum(chunk.rows for chunk in chunks)
    return [first._replace(rows=rows, batch=batch, further=further)]


def _batches_of(
    delivery: DeliveredRange, candidate: Candidate, batches: Batches
) -> tuple[int, Sequence[BatchEntry], Sequence[bytes]]:
    """Return the first offset of the first batch that has rows of the delivery, and the
    batches that have, as stored and as read.
    """
    entries = candidate.batches
    if len(entries) == 1:
        return candidate.base_offset, entries, batches
    bases = list(accumulate((entry.count for entry in entries), initial=candidate.base_offset))
    low, high = bisect_right(bases, delivery.start) - 1, bisect_left(bases, delivery.end)
    return bases[low], entries[low:high], batches[low:high]
