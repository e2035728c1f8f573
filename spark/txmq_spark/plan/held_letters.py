"""The messages of letters that plans of the broker hold, read in bulk by their places.

A task has the places of its letters partition by partition, in their order, so each
reads its part of the log once. What comes is columns of batches, which are stored again
in the same task: no message enters Java. The letters that are not read leave their
plan: what it holds in the end was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from txmq.batch import BatchView
from txmq.client.protocol.sender.rows import micros_now
from txmq.wire.chunks import Chunk
from txmq_spark.plan.broker_plans import PAGE
from txmq_spark.plan.letter_shares import WAITS
from txmq_spark.source.arrow_messages import SMALL_BATCH_ROWS, OffsetRange
from txmq_spark.source.arrow_rows import COLUMNS, SCHEMA, ArrowRows, batch_columns
from txmq_spark.source.broker_link import BrokerLink

OPERATOR: Final = "txmq-spark"
UNREAD: Final = "its message was not sent: it cannot be read, or others of its key wait for it"
RUN_PLACES: Final = 1 << 17  # read by one range of offsets
COLUMN_ROWS: Final = 4_096  # of columns that are stored at once
COLUMN_BYTES: Final = 1 << 20  # or bytes of the batches they come from

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class HeldSource(NamedTuple):
    """A partition, and the plan of the broker that holds letters of it."""

    plan: str
    topic: str
    partition: int


class PlaceRun(NamedTuple):
    """Places of one source, in the order of their offsets."""

    source: int
    offsets: Numbers
    waits: np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(slots=True)
class LetterColumns:
    """Messages of letters, column by column."""

    count: int = 0
    size: int = 0  # bytes of the batches they come from
    _batches: list[pa.RecordBatch] = field(default_factory=list)
    # cells of the last rows that are no record batch yet
    _cells: list[list[bytes]] = field(default_factory=lambda: [[] for _ in COLUMNS])

    @property
    def is_full(self) -> bool:
        return self.count >= COLUMN_ROWS or self.size >= COLUMN_BYTES

    def add(self, view: BatchView, start: int, end: int) -> None:
        """Add the rows of a batch from `start` up to `end`, excluded."""
        self.count += end - start
        self.size += len(view.buffer)
        if end - start >= SMALL_BATCH_ROWS:
            self._close()
            self._batches.append(batch_columns(view).slice(start, end - start))
            return
        bodies, keys, tags, headers = self._cells
        bodies += view.bodies[start:end]
        keys += [(key or "").encode() for key in view.keys[start:end]]
        tags += [(tag or "").encode() for tag in view.tags[start:end]]
        headers += view.header_cells[start:end]

    def rows(self) -> ArrowRows:
        """Return the messages as rows, which are born now."""
        self._close()
        columns = zip(*(batch.columns for batch in self._batches), strict=True)
        arrays = list(map(pa.concat_arrays, columns))
        return ArrowRows(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), micros_now())

    def _close(self) -> None:
        if self._cells[0]:
            arrays = [pa.array(cells, pa.binary()) for cells in self._cells]
            self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
            self._cells = [[] for _ in COLUMNS]


def held_letters(
    link: BrokerLink, sources: Sequence[HeldSource], places: Iterable[pa.RecordBatch]
) -> Iterator[ArrowRows]:
    """Yield the messages of the letters at these places, in their order, as far as the
    broker's plans hold them.

    A letter whose message is damaged is left out, and so is one that `waits`.
    """
    columns = LetterColumns()
    for run in place_runs(places):
        source = sources[run.source]
        left = [run.offsets[run.waits]]
        for rows in _read(link, source, run.offsets[~run.waits], left):
            if columns.is_full:
                yield columns.rows()
                columns = LetterColumns()
            columns.add(*rows)
        _leave(link, source, np.concatenate(left).tolist())
    if columns.count:
        yield columns.rows()


def place_runs(batches: Iterable[pa.RecordBatch]) -> Iterator[PlaceRun]:
    """Yield places that are together in one partition, whose offsets rise."""
    runs: list[PlaceRun] = []
    for batch in batches:
        sources, offsets = (batch.column(name).to_numpy() for name in ("source", "offset"))
        waits = batch.column(WAITS).to_numpy(zero_copy_only=False)
        ends = np.flatnonzero((np.diff(sources) != 0) | (np.diff(offsets) < 0)) + 1
        start = 0
        for end in (*ends.tolist(), len(sources)):
            run = PlaceRun(int(sources[start]), offsets[start:end], waits[start:end])
            if runs and not _follows(runs, run):
                yield _joined(runs)
                runs = []
            runs.append(run)
            start = end
    if runs:
        yield _joined(runs)


def _follows(runs: Sequence[PlaceRun], run: PlaceRun) -> bool:
    last = runs[-1]
    return (
        run.source == last.source
        and run.offsets[0] > last.offsets[-1]
        and sum(len(one.offsets) for one in runs) < RUN_PLACES
    )


def _joined(runs: Sequence[PlaceRun]) -> PlaceRun:
    offsets, waits = (np.concatenate(column) for column in list(zip(*runs, strict=True))[1:])
    return PlaceRun(runs[0].source, offsets, waits)


def _read(
    link: BrokerLink, source: HeldSource, wanted: Numbers, left: list[Numbers]
) -> Iterator[tuple[BatchView, int, int]]:
    """Yield rows of batches that are `wanted`. Offsets that do not come are added to
    what is `left`.
    """
    if not len(wanted):
        return
    at = 0
    span = OffsetRange(source.topic, source.partition, int(wanted[0]), int(wanted[-1]) + 1)
    for chunk in link.held_letters(source.plan, span):
        first = chunk.base_offset + chunk.first_row
        start, end = np.searchsorted(wanted, (first, first + chunk.rows)).tolist()
        left.append(wanted[at:start])
        at = end
        yield from _rows_of(chunk, wanted[start:end])
    left.append(wanted[at:])


def _rows_of(chunk: Chunk, wanted: Numbers) -> Iterator[tuple[BatchView, int, int]]:
    """Yield the rows at the offsets that are wanted, as ranges."""
    if not len(wanted):
        return
    view = BatchView(chunk.batch)
    rows = wanted - chunk.base_offset
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    start = 0
    for end in (*ends.tolist(), len(rows)):
        yield view, int(rows[start]), int(rows[end - 1]) + 1
        start = end


def _leave(link: BrokerLink, source: HeldSource, offsets: Sequence[int]) -> None:
    """Take letters that are not sent out of the plan."""
    for first in range(0, len(offsets), PAGE):
        letters = [
            (source.topic, source.partition, offset) for offset in offsets[first : first + PAGE]
        ]
        args = {"letters": letters, "operator": OPERATOR, "reason": UNREAD}
        link.call("plan.leave", name=source.plan, **args)
