"""Catalogues (`store/catalogue/catalogue.py`) of published messages, built and merged.

    python -m txmq.broker.search.catalogue_build DATA

This is a process of its own, with a lower priority than the broker, so that no send
pays for it. It reads LMDB, which never leads the log, and the batches; it writes only
files of its own. Killed at any moment, it leaves the old catalogues, the new ones, or
both. In the last case a batch is named twice, which does no harm.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from google_crc32c import value as crc32c

from txmq.batch import locate, read_header
from txmq.batch.cells import headers_of
from txmq.batch.decode import cells_of
from txmq.batch.header import HEADERS, KEY, PREFIX
from txmq.core.persistence import TOPIC_KEY, topic_from_row
from txmq.core.state.state import VisibilityBarrier
from txmq.errors import StoreError
from txmq.model.causation import CORRELATION
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t
from txmq.store.catalogue.catalogue import (
    PLACE,
    Catalogue,
    Range,
    catalogue_directory,
    covering_blocks,
    discard,
    encode_place,
    hash_of_correlation,
    hash_of_id,
    hash_of_key,
    open_catalogues,
)
from txmq.store.catalogue.pages import DamagedPage
from txmq.store.catalogue.writer import merge_tier, remove_files, write_catalogue
from txmq.store.filesystem import RealFileSystem
from txmq.store.index.environment import read_position, read_transaction
from txmq.store.index.lmdb_table import LmdbTable
from txmq.store.log.reader import LogReader
from txmq.store.log.segment import list_segments, read_log_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from uuid import UUID

    from txmq.batch.header import BatchHeader
    from txmq.store.filesystem import FileSystem
    from txmq.store.tables import Tables

MAX_CATALOGUE_BYTES = 64 << 20  # of batches in a new catalogue
MAX_CATALOGUE_ROWS = 1_000_000  # sorted in memory: 80 MB
NICENESS = 19  # than the broker


class CatalogueSource(NamedTuple):
    """The source of a catalogue: the tables as of a position, up to which the log is
    durable, and the log's bytes.
    """

    log_id: UUID
    position: int
    tables: Tables
    read: Callable[[int, int], bytes]


def update(fs: FileSystem, directory: str, source: CatalogueSource) -> bool:
    """Catalogue batches that are in no catalogue; merge small catalogues, and remove
    those of deleted messages. Blocks.

    Return whether there is more to do. Raises StoreError.
    """
    fs.makedirs(catalogue_directory(directory))
    try:
        return _update(fs, directory, source)
    except DamagedPage as error:
        discard(fs, error.path)
        return True


def _update(fs: FileSystem, directory: str, source: CatalogueSource) -> bool:
    catalogues = open_catalogues(fs, directory, source.log_id)
    visible = _visible_ranges(source)
    covered, expired = _coverage(catalogues, visible)
    if expired:
        remove_files(fs, directory, expired)
    new = _CatalogueRows(source)
    for place, (first, end) in visible.items():
        for gap in gaps(covered.get(place, ()), first, end):
            new.add_range(*place, *gap)
        if new.full:
            break
    if new.ranges:
        write_catalogue(fs, directory, new.about, sorted(new.rows), sorted(new.ranges))
        return True
    return merge_tier(
        fs, directory, [catalogue for catalogue in catalogues if catalogue not in expired]
    )


def gaps(covered: Iterable[tuple[int, int]], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Return the parts of [first, end) that none of these ranges covers; they are in
    order and may overlap.
    """
    at = first
    for start, stop in covered:
        if start >= end:
            break
        if start > at:
            yield at, start
        at = max(at, stop)
    if at < end:
        yield at, end


def _visible_ranges(source: CatalogueSource) -> dict[TopicPartition, tuple[int, int]]:
    """Return the first offset and the visible end of each partition."""
    visible = {}
    for key, row in source.tables[t.TOPICS].range(b""):
        topic = topic_from_row(TOPIC_KEY.unpack(key)[0], row)
        if not topic.deleted:
            for partition, (first, end) in enumerate(
                zip(topic.start_offsets, topic.end_offsets, strict=True)
            ):
                visible[TopicPartition(topic.topic_id, partition)] = first, end
    for key, row in source.tables[t.BARRIERS].range(b""):
        place, barrier = TopicPartition(*t.PARTITION_KEY.unpack(key)), VisibilityBarrier._make(row)
        if place in visible and not 0 < barrier.lifted_at <= source.position:
            visible[place] = visible[place][0], min(visible[place][1], barrier.offset)
    return visible


def _coverage(
    catalogues: list[Catalogue], visible: dict[TopicPartition, tuple[int, int]]
) -> tuple[dict[TopicPartition, list[tuple[int, int]]], list[Catalogue]]:
    """Return the catalogued ranges, and the catalogues of which no message exists any
    more.
    """
    covered: dict[TopicPartition, list[tuple[int, int]]] = {}
    expired = []
    for catalogue in catalogues:
        alive = False
        for topic_id, partition, first, end in catalogue.ranges():
            place = TopicPartition(topic_id, partition)
            covered.setdefault(place, []).append((first, end))
            alive = alive or end > visible.get(place, (end, 0))[0]
        if not alive:
            expired.append(catalogue)
    for ranges in covered.values():
        ranges.sort()
    return covered, expired


class _CatalogueRows:
    """The rows of a new catalogue."""

    def __init__(self, source: CatalogueSource) -> None:
        self._source = source
        self._size = self._levels = 0
        self.rows: list[bytes] = []
        self.ranges: list[Range] = []

    @property
    def full(self) -> bool:
        return self._size >= MAX_CATALOGUE_BYTES or len(self.rows) >= MAX_CATALOGUE_ROWS

    @property
    def about(self) -> tuple[UUID, int, int, int]:
        return self._source.log_id, self._source.position, self._size, self._levels

    def add_range(self, topic_id: int, partition: int, first: int, end: int) -> None:
        """Add the batches of these offsets. Unreadable ones stay out, so that a reader
        meets the damage itself.
        """
        low, high = (t.ENTRY_KEY.pack(topic_id, partition, at) for at in (first, end))
        for key, row in self._source.tables[t.ENTRIES].range(low, high):
            entry, base = t.BatchEntry._make(row), t.ENTRY_KEY.unpack(key)[2]
            if self.full or entry.visible_at > self._source.position:
                return
            data = self._batch(entry) if entry.length else None
            if data is not None:
                self._add(topic_id, encode_place(partition, base), data)
                self._cover(Range(topic_id, partition, base, base + entry.count))

    def _batch(self, entry: t.BatchEntry) -> bytes | None:
        try:
            data = self._source.read(entry.position, entry.length)
        except StoreError:
            return None
        return data if crc32c(data[PREFIX.size :]) == PREFIX.unpack_from(data)[1] else None

    def _add(self, topic_id: int, place: int, data: bytes) -> None:
        header, at = read_header(data), PLACE.pack(place)
        column = locate(data, header).key if header.columns & KEY else None
        if column is not None:
            cells = set(cells_of(data, column, header.count)) - {b""}
            self.rows += [hash_of_key(topic_id, cell) + at for cell in cells]
        if header.columns & HEADERS:
            found = _correlations(data, header)
            self.rows += [hash_of_correlation(topic_id, text) + at for text in found]
        for level, block in covering_blocks(header.sequence, header.count):
            self.rows.append(hash_of_id(topic_id, header.producer_id, level, block) + at)
            self._levels |= 1 << level
        self._size += header.length

    def _cover(self, found: Range) -> None:
        last = self.ranges[-1] if self.ranges else found
        if last[:2] == found[:2] and last.end == found.first:
            self.ranges[-1] = last._replace(end=found.end)
        else:
            self.ranges.append(found)


def _correlations(data: bytes, header: BatchHeader) -> set[str]:
    column = locate(data, header).headers
    cells = set(cells_of(data, column, header.count)) if column is not None else set[bytes]()
    named = [headers_of(cell) for cell in cells if CORRELATION.encode() in cell]
    return {headers[CORRELATION] for headers in named if CORRELATION in headers}


@contextmanager
def _source(
    fs: FileSystem, directory: Path, log_id: UUID, parent: int
) -> Iterator[CatalogueSource]:
    reader = LogReader(
        fs, str(directory), [segment.first for segment in list_segments(fs, str(directory))]
    )

    def read(position: int, length: int) -> bytes:
        if os.getppid() != parent:
            sys.exit("the broker is gone")
        return reader.read(position, length)

    with read_transaction(directory / "index", log_id) as (txn, databases):
        tables = {name: LmdbTable(database, txn) for name, database in databases.items()}
        yield CatalogueSource(log_id, read_position(txn, databases), tables, read)


def main(arguments: Any) -> None:  # noqa: ANN401  # the command line
    """Build until nothing is left to do, or the parent process is gone."""
    os.nice(NICENESS)
    fs, directory, parent = RealFileSystem(), Path(arguments[1]), os.getppid()
    log_id = read_log_id(fs, str(directory))
    more = log_id is not None
    while more and log_id is not None:
        with _source(fs, directory, log_id, parent) as source:
            more = update(fs, str(directory), source)


if __name__ == "__main__":
    main(sys.argv)
