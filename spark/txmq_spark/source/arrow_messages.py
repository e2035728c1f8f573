"""Stored batches as Arrow record batches, without a loop over single messages.

A batch on the wire has Arrow's own layout for texts and bytes (docs/FORMATS.md 3), so
its columns are used in place. A record batch costs about 200 µs to build, however many
rows it has. Batches of a few rows, as single sends leave them, are therefore collected
row by row until they fill one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from txmq.batch import BatchView, Codec, Column, locate, read_header
from txmq.batch.codecs import decompress
from txmq.batch.layout import OFFSET
from txmq.wire.chunks import Chunk

TIME: Final = pa.timestamp("us", tz="UTC")
HEADERS: Final = pa.map_(pa.string(), pa.string())

# Spark treats every column of a foreign source as nullable.
MESSAGES: Final = pa.schema(
    {
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "message_id": pa.string(),
        "key": pa.string(),
        "tag": pa.string(),
        "headers": HEADERS,
        "body": pa.binary(),
        "attempt": pa.int32(),
        "born_at": TIME,
        "stored_at": TIME,
    }
)
SMALL_BATCH_ROWS: Final = 64  # below so many rows, row by row is cheaper
BUFFER_ROWS: Final = 4_096  # rows of a collected record batch
BUFFER_BYTES: Final = 8 << 20  # or bytes of the batches they come from


class OffsetRange(NamedTuple):
    """The offsets of one partition from `start` up to `end`, excluded."""

    topic: str
    partition: int
    start: int
    end: int


def record_batches(
    chunks: Iterable[Chunk], offsets: OffsetRange, names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the columns `names` of the messages in these offsets.

    The chunks are in order, and may hold more than the range.
    """
    few = _RowBuffer(names)
    for chunk in chunks:
        rows = _rows_of(chunk, offsets)
        if len(rows) >= SMALL_BATCH_ROWS:
            yield from few.flush()
            yield wrap(chunk, names).slice(rows.start, len(rows))
        elif rows:
            few.add(chunk, rows)
            if few.is_full:
                yield from few.flush()
    yield from few.flush()


def wrap(chunk: Chunk, names: Sequence[str]) -> pa.RecordBatch:
    """Return the columns `names` of all rows of the chunk's batch.

    The rows that the chunk does not cover are included.
    """
    batch = _ArrowBatch(chunk)
    schema = pa.schema([MESSAGES.field(name) for name in names])
    return pa.RecordBatch.from_arrays([COLUMNS[name](batch) for name in names], schema=schema)


def _rows_of(chunk: Chunk, offsets: OffsetRange) -> range:
    """Return the rows of the chunk that are in the range."""
    first = max(chunk.first_row, offsets.start - chunk.base_offset)
    return range(first, min(chunk.first_row + chunk.rows, offsets.end - chunk.base_offset))


class _ArrowBatch:
    """A batch whose columns become Arrow arrays over its own bytes."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.header = read_header(chunk.batch)
        self.count = self.header.count
        self.layout = locate(chunk.batch, self.header)
        self.buffer = pa.py_buffer(chunk.batch)

    def constant(self, value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), self.count)

    def numbers(self, first: int) -> pa.Array:
        return pa.array(np.arange(first, first + self.count, dtype=np.int64))

    def message_ids(self) -> pa.Array:
        sequences = pc.cast(self.numbers(self.header.sequence), pa.string())
        return pc.binary_join_element_wise(self.header.producer_id.hex(), sequences, "-")

    def texts(self, column: Column | None) -> pa.Array:
        """Return the cells of a column; an empty cell is null."""
        if column is None:
            return pa.nulls(self.count, pa.string())
        offsets, data = self._buffers(column)
        cells = pa.Array.from_buffers(pa.binary(), self.count, [None, offsets, data])
        present = pc.not_equal(pc.binary_length(cells), 0).buffers()[1]
        return pa.Array.from_buffers(pa.string(), self.count, [present, offsets, data])

    def headers(self) -> pa.Array:
        if self.layout.headers is None:
            return pa.nulls(self.count, HEADERS)
        return _maps(BatchView(self.chunk.batch, self.header).headers)

    def bodies(self) -> pa.Array:
        body = self.layout.body
        offsets, data = self._buffers(body)
        if self.header.codec != Codec.NONE:
            data = pa.py_buffer(decompress(self.header.codec, data.to_pybytes(), self.header.size))
        return pa.Array.from_buffers(pa.binary(), self.count, [None, offsets, data])

    def _buffers(self, column: Column) -> tuple[pa.Buffer, pa.Buffer]:
        """Return the offsets and the bytes of a column."""
        offsets = self.buffer.slice(column.offsets, OFFSET.size * (self.count + 1))
        return offsets, self.buffer.slice(column.start, column.end - column.start)

    def born_at(self) -> pa.Array:
        times = self.buffer.slice(self.layout.born_at, 8 * self.count)
        return pa.Array.from_buffers(TIME, self.count, [None, times])


COLUMNS: Final[dict[str, Callable[[_ArrowBatch], pa.Array]]] = {
    "topic": lambda batch: batch.constant(batch.chunk.topic, pa.string()),
    "partition": lambda batch: batch.constant(batch.chunk.partition, pa.int32()),
    "offset": lambda batch: batch.numbers(batch.chunk.base_offset),
    "message_id": _ArrowBatch.message_ids,
    "key": lambda batch: batch.texts(batch.layout.key),
    "tag": lambda batch: batch.texts(batch.layout.tag),
    "headers": _ArrowBatch.headers,
    "body": _ArrowBatch.bodies,
    "attempt": lambda batch: batch.constant(batch.chunk.attempt, pa.int32()),
    "born_at": _ArrowBatch.born_at,
    "stored_at": lambda batch: batch.constant(batch.chunk.stored_at, TIME),
}


class _RowBuffer:
    """Rows of small batches, column by column."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._cells: dict[str, list[Any]] = {name: [] for name in names}
        self._rows = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._rows >= BUFFER_ROWS or self._bytes >= BUFFER_BYTES

    def add(self, chunk: Chunk, rows: range) -> None:
        view = BatchView(chunk.batch)
        for name in self._names:
            self._cells[name] += CELLS[name](chunk, view, rows)
        self._rows += len(rows)
        self._bytes += len(chunk.batch)

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Yield the collected rows as one record batch, if there are any."""
        if self._rows:
            schema = pa.schema([MESSAGES.field(name) for name in self._names])
            arrays = [
                arrow_column(self._cells[name], schema.field(name).type) for name in self._names
            ]
            self._cells = {name: [] for name in self._names}
            self._rows = self._bytes = 0
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


Cells = Callable[[Chunk, BatchView, range], list[Any]]


def _sliced(column: Callable[[BatchView], Sequence[Any]]) -> Cells:
    return lambda _chunk, view, rows: list(column(view)[rows.start : rows.stop])


CELLS: Final[dict[str, Cells]] = {
    "topic": lambda chunk, _view, rows: [chunk.topic] * len(rows),
    "partition": lambda chunk, _view, rows: [chunk.partition] * len(rows),
    "offset": lambda chunk, _view, rows: [chunk.base_offset + row for row in rows],
    "message_id": _sliced(lambda view: view.message_ids),
    "key": _sliced(lambda view: view.keys),
    "tag": _sliced(lambda view: view.tags),
    "headers": _sliced(lambda view: view.headers),
    "body": _sliced(lambda view: view.bodies),
    "attempt": lambda chunk, _view, rows: [chunk.attempt] * len(rows),
    "born_at": _sliced(lambda view: view.born_at),
    "stored_at": lambda chunk, _view, rows: [chunk.stored_at] * len(rows),
}


def arrow_column(cells: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return Python values as an Arrow array.

    Headers are given as mappings; empty headers become null.
    """
    return _maps(cells) if kind.equals(HEADERS) else pa.array(cells, kind)


def _maps(headers: Sequence[Any]) -> pa.Array:
    return pa.array([list(pairs.items()) if pairs else None for pairs in headers], HEADERS)
