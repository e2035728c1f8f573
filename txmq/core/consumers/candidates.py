"""Candidates of a delivery: rows of stored batches, neighbouring batches joined to
runs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.positions import Redelivery
    from txmq.model.topic_partition import TopicPartition


# From a larger batch, a single row is sent instead of the whole batch.
SINGLE_ROW_BYTES = 4_096


class CandidateSource(IntEnum):
    """Origin of a candidate."""

    LIVE = 1  # never delivered
    REDELIVER = 2  # delivered before, and returned
    EXHAUSTED = 3  # returned after its last attempt: it becomes a dead letter
    FAILED = 4  # a failed message that is due


class Candidate(NamedTuple):
    """Rows of one stored batch, or of a run of batches, that could be delivered
    together.

    `further` batches follow the first one without a gap in offsets. `wanted` is False
    if no row can have a tag that the member wants.
    """

    source: CandidateSource
    topic_id: int
    partition: int
    base_offset: int
    first_row: int
    rows: int
    attempt: int
    needs_keys: bool
    batch: t.BatchEntry  # of a failed message: without count and tag filter
    further: tuple[t.BatchEntry, ...] = ()
    wanted: bool = True
    deaths: int = 0  # consumers lost with each of its messages

    @property
    def start(self) -> int:
        """Offset of the first row."""
        return self.base_offset + self.first_row

    @property
    def batches(self) -> tuple[t.BatchEntry, ...]:
        """The first batch and the further ones."""
        return (self.batch, *self.further)


class FetchLimits(NamedTuple):
    """Limits and filters of one fetch.

    `tag_filter` selects batches that share a bit with it, 0 = all. Neighbouring batches
    are joined to runs of at most `max_run_rows` rows. Topics are excluded by their ids.
    """

    max_messages: int
    max_bytes: int
    tag_filter: int = 0
    max_run_rows: int = 0
    excluded_topics: frozenset[int] = frozenset()


class RunBuilder:
    """Builder of candidates from neighbouring batches, in runs of at most `most`
    rows.
    """

    def __init__(
        self,
        source: CandidateSource,
        tp: TopicPartition,
        redelivery: Redelivery,
        *,
        needs_keys: bool,
        most: int,
    ) -> None:
        self.source, self._most = source, most
        self._head = (source, *tp)
        self._rest = (redelivery.attempt, needs_keys)
        self._deaths = redelivery.deaths
        self._made: list[Candidate] = []
        self._base = self._first = self._rows = 0
        self._entries: list[t.BatchEntry] = []
        self._wanted = True

    def add(self, base: int, first: int, rows: int, entry: t.BatchEntry, *, wanted: bool) -> None:
        """Add rows of the next batch."""
        if self._entries and (self._rows + rows > self._most or wanted is not self._wanted):
            self._close()
        if not self._entries:
            self._base, self._first, self._rows, self._wanted = base, first, 0, wanted
        self._entries.append(entry)
        self._rows += rows

    def _close(self) -> None:
        batch, *further = self._entries
        self._entries = []
        rows = (self._base, self._first, self._rows)
        self._made.append(
            Candidate(
                *self._head, *rows, *self._rest, batch, tuple(further), self._wanted, self._deaths
            )
        )

    def candidates(self) -> list[Candidate]:
        """Return the candidates of all batches."""
        if self._entries:
            self._close()
        return self._made
