"""Rows of messages to send, as columns of Arrow: no message is an object of Python.

Offsets and bytes of a column are those of a batch (docs/FORMATS.md 3), so they are
stored as they come. What is left for each row is the hash of its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh64_intdigest

from txmq.batch import (
    NO_COMPRESSION,
    BatchView,
    Cells,
    Codec,
    Column,
    Compression,
    encode_cells,
    locate,
)
from txmq.batch.cells import too_large
from txmq.batch.codecs import decompress
from txmq.batch.layout import OFFSET
from txmq.client.protocol.sender.rows import BATCH_ROWS, ROW_OVERHEAD, batch_bounds
from txmq.model import limits
from txmq.model.keys import SEED, tag_filter

COLUMNS: Final = ("body", "key", "tag", "headers")
SCHEMA: Final = pa.schema([pa.field(name, pa.binary()) for name in COLUMNS])

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """Columns `body`, `key`, `tag` and `headers`, each of binary without null: texts in
    UTF-8, and headers as a batch has them. Empty = none. All rows are born at one time.
    """

    columns: pa.RecordBatch
    born_at: int

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    @property
    def size(self) -> int:
        """The bytes of the rows in a batch, about."""
        return int(self._sizes().sum())

    def encode(
        self,
        producer_id: bytes,
        sequence: int,
        compression: Compression = NO_COMPRESSION,
        max_body: int = limits.MESSAGE,
    ) -> bytes:
        """Return the batch of all rows. Raises MessageTooLarge."""
        if (largest := self.largest_body()) > max_body:
            raise too_large("message", largest, max_body)
        bodies, *optional = (cells_of(self.columns.column(name)) for name in COLUMNS)
        keys, tags, headers = (cells if cells.data else None for cells in optional)
        tag_bits = tag_filter(_texts(self.columns.column("tag"))) if tags else 0
        return encode_cells(
            *(bodies, keys, tags, headers),
            tag_bits=tag_bits,
            producer_id=producer_id,
            epoch=0,
            sequence=sequence,
            born_at=self.born_at,
            codec=compression.codec and compression.codec_for(len(bodies.data)),
        )

    def split(self, max_rows: int = BATCH_ROWS) -> Iterator[ArrowRows]:
        """Yield the same rows in batches that fit in a frame."""
        for start, end in batch_bounds(self._sizes().tolist(), max_rows):
            yield ArrowRows(self.columns.slice(start, end - start), self.born_at)

    def row_keys(self) -> Sequence[str | None]:
        """Return the key of each row."""
        return [key.decode() or None for key in self.columns.column("key").to_pylist()]

    def places(self, partitions: int, keyless: int) -> dict[int, list[int]]:
        """Return the places of the rows of each partition; rows without a key go to
        `keyless`.
        """
        keys = self.columns.column("key").dictionary_encode()
        distinct = keys.dictionary.to_pylist()
        hashes = np.array([xxh64_intdigest(key, SEED) for key in distinct], np.uint64)
        of_key = hashes.view(np.int64) % partitions
        of_key[_lengths(keys.dictionary) == 0] = keyless
        chosen = of_key[keys.indices.to_numpy()]
        order = np.argsort(chosen, kind="stable")
        found, starts = np.unique(chosen[order], return_index=True)
        cut = np.split(order, starts[1:])
        return {int(one): places.tolist() for one, places in zip(found, cut, strict=True)}

    def largest_body(self) -> int:
        """Return the size of the largest body."""
        return longest_of(self.columns.column("body"))

    def select(self, places: Sequence[int]) -> ArrowRows:
        """Return the rows at these places."""
        return ArrowRows(self.columns.take(pa.array(places, pa.int32())), self.born_at)

    def _sizes(self) -> Numbers:
        lengths = [_lengths(self.columns.column(name)) for name in COLUMNS]
        sizes: Numbers = np.sum(lengths, axis=0) + ROW_OVERHEAD
        return sizes


def batch_columns(view: BatchView) -> pa.RecordBatch:
    """Return the columns of a batch, over its own bytes unless they are compressed."""
    header, buffer = view.header, pa.py_buffer(view.buffer)
    layout = locate(view.buffer, header)
    size = OFFSET.size * (header.count + 1)

    def column(place: Column | None, codec: int = Codec.NONE) -> pa.Array:
        if place is None:
            return empty_column(header.count)
        data = buffer.slice(place.start, place.end - place.start)
        if codec != Codec.NONE:
            data = pa.py_buffer(decompress(codec, data.to_pybytes(), header.size))
        buffers = [None, buffer.slice(place.offsets, size), data]
        return pa.Array.from_buffers(pa.binary(), header.count, buffers)

    columns = [column(layout.body, header.codec)]
    columns += [column(place) for place in (layout.key, layout.tag, layout.headers)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def binary_column(column: pa.Array) -> pa.Array:
    """Return a column of texts or bytes as one of binary, in which null is empty."""
    cells = column.cast(pa.binary())
    return cells.fill_null(b"") if cells.null_count else cells


def empty_column(rows: int) -> pa.Array:
    """Return a column of binary without bytes."""
    buffers = [None, pa.py_buffer(bytes(OFFSET.size * (rows + 1))), pa.py_buffer(b"")]
    return pa.Array.from_buffers(pa.binary(), rows, buffers)


def longest_of(column: pa.Array) -> int:
    """Return the size of the largest cell of a column of binary."""
    return int(_lengths(column).max())


def cells_of(column: pa.Array) -> Cells:
    """Return a column of binary, without null, as batches have it."""
    offsets = _offsets(column)
    first, last = int(offsets[0]), int(offsets[-1])
    data = column.buffers()[2]
    joined = b"" if data is None else data.slice(first, last - first).to_pybytes()
    return Cells((offsets - offsets[0]).astype("<i4").tobytes(), joined)


def _lengths(column: pa.Array) -> Numbers:
    return np.diff(_offsets(column)).astype(np.int64)


def _offsets(column: pa.Array) -> np.ndarray[Any, np.dtype[np.int32]]:
    if not len(column):
        return np.zeros(1, np.int32)
    every = np.frombuffer(column.buffers()[1], np.int32)
    return every[column.offset : column.offset + len(column) + 1]


def _texts(column: pa.Array) -> list[str]:
    return [text.decode() for text in pc.unique(column).to_pylist() if text]
