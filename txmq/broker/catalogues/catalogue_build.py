"""Makes catalogues (`store/catalogue.py`) of what was published, and has small ones
merged.

    python -m txmq.broker.catalogues.catalogue_build DATA        a process of its own, nicer than the broker: sending costs nothing

It reads LMDB, which never leads the log, and the batches; it writes files of its own
only. Killed at any moment it leaves the old catalogues or the new ones, or both: then a
batch is named twice, which is once too often and no more.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from google_crc32c import value as crc32c

from txmq.batch import locate, read_header
from txmq.batch.decode import cells_of
from txmq.batch.header import KEY, PREFIX
from txmq.core.persistence import TOPIC_KEY, topic_of
from txmq.core.state.visibility import Gate
from txmq.errors import StoreError
from txmq.store import tables as t
from txmq.store.catalogue import (
    PLACE,
    Catalogue,
    Range,
    blocks,
    discard,
    folder_of,
    hash_of_id,
    hash_of_key,
    open_catalogues,
    place_of,
)
from txmq.store.catalogue_writing import merge_some, remove, write
from txmq.store.environment import read_position, reading
from txmq.store.fs import RealFileSystem
from txmq.store.lmdb_table import LmdbTable
from txmq.store.pages import DamagedPage
from txmq.store.reader import LogReader
from txmq.store.segment import list_segments, read_log_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from uuid import UUID

    from txmq.store.fs import FileSystem
    from txmq.store.tables import Tables

MOST_BYTES = 64 << 20  # of batches in a new catalogue
MOST_ROWS = 1_000_000  # which are sorted in memory: 80 MB
NICER = 19  # than the broker
Spot = tuple[int, int]  # topic id, partition


class Source(NamedTuple):
    """What is catalogued: the tables as of a position, up to which the log is durable,
    and the log's bytes.
    """

    log_id: UUID
    position: int
    tables: Tables
    read: Callable[[int, int], bytes]


def update(fs: FileSystem, directory: str, source: Source) -> bool:
    """Catalogue what is in no catalogue yet, or a part of it; merge small catalogues,
    and remove those of what is gone.

    Whether there is more to do. Blocks. Raises StoreError where the disk does.
    """
    fs.makedirs(folder_of(directory))
    try:
        return _update(fs, directory, source)
    except DamagedPage as error:
        discard(fs, error.path)
        return True


def _update(fs: FileSystem, directory: str, source: Source) -> bool:
    known = open_catalogues(fs, directory, source.log_id)
    wanted = _wanted(source)
    covered, dead = _look_at(known, wanted)
    if dead:
        remove(fs, directory, dead)
    new = _New(source)
    for spot, (first, end) in wanted.items():
        for gap in gaps(covered.get(spot, ()), first, end):
            new.take(*spot, *gap)
        if new.full:
            break
    if new.ranges:
        write(fs, directory, new.about, sorted(new.rows), sorted(new.ranges))
        return True
    return merge_some(fs, directory, [catalogue for catalogue in known if catalogue not in dead])


def gaps(covered: Iterable[tuple[int, int]], first: int, end: int) -> Iterator[tuple[int, int]]:
    """What of [first, end) lies in none of these ranges, which are in order and may
    overlap.
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


def _wanted(source: Source) -> dict[Spot, tuple[int, int]]:
    """Of each partition the first offset, and the one after the last that readers may
    see.
    """
    wanted = {}
    for key, row in source.tables[t.TOPICS].range(b""):
        topic = topic_of(TOPIC_KEY.unpack(key)[0], row)
        if not topic.deleted:
            for partition, (first, end) in enumerate(zip(topic.firsts, topic.ends, strict=True)):
                wanted[topic.topic_id, partition] = first, end
    for key, row in source.tables[t.GATES].range(b""):
        spot, gate = t.PARTITION_KEY.unpack(key), Gate._make(row)
        if spot in wanted and not 0 < gate.lifted <= source.position:
            wanted[spot] = wanted[spot][0], min(wanted[spot][1], gate.offset)
    return wanted


def _look_at(
    known: list[Catalogue], wanted: dict[Spot, tuple[int, int]]
) -> tuple[dict[Spot, list[tuple[int, int]]], list[Catalogue]]:
    """What is covered, and the catalogues of which nothing is kept any more."""
    covered: dict[Spot, list[tuple[int, int]]] = {}
    dead = []
    for catalogue in known:
        alive = False
        for topic_id, partition, first, end in catalogue.ranges():
            covered.setdefault((topic_id, partition), []).append((first, end))
            alive = alive or end > wanted.get((topic_id, partition), (end, 0))[0]
        if not alive:
            dead.append(catalogue)
    for ranges in covered.values():
        ranges.sort()
    return covered, dead


class _New:
    """The rows of a catalogue that is being made."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._size = self._levels = 0
        self.rows: list[bytes] = []
        self.ranges: list[Range] = []

    @property
    def full(self) -> bool:
        return self._size >= MOST_BYTES or len(self.rows) >= MOST_ROWS

    @property
    def about(self) -> tuple[UUID, int, int, int]:
        return self._source.log_id, self._source.position, self._size, self._levels

    def take(self, topic_id: int, partition: int, first: int, end: int) -> None:
        """The batches of these offsets. What cannot be read stays out, and so a reader
        meets the damage itself.
        """
        low, high = (t.ENTRY_KEY.pack(topic_id, partition, at) for at in (first, end))
        for key, row in self._source.tables[t.ENTRIES].range(low, high):
            entry, base = t.Entry._make(row), t.ENTRY_KEY.unpack(key)[2]
            if self.full or entry.visible_at > self._source.position:
                return
            data = self._batch(entry)
            if data is not None:
                self._add(topic_id, place_of(partition, base), data)
                self._cover(Range(topic_id, partition, base, base + entry.count))

    def _batch(self, entry: t.Entry) -> bytes | None:
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
        for level, block in blocks(header.sequence, header.count):
            self.rows.append(hash_of_id(topic_id, header.producer_id, level, block) + at)
            self._levels |= 1 << level
        self._size += header.length

    def _cover(self, found: Range) -> None:
        last = self.ranges[-1] if self.ranges else found
        if last[:2] == found[:2] and last.end == found.first:
            self.ranges[-1] = last._replace(end=found.end)
        else:
            self.ranges.append(found)


@contextmanager
def _source(fs: FileSystem, directory: Path, log_id: UUID, parent: int) -> Iterator[Source]:
    reader = LogReader(
        fs, str(directory), [segment.first for segment in list_segments(fs, str(directory))]
    )

    def read(position: int, length: int) -> bytes:
        if os.getppid() != parent:
            sys.exit("the broker is gone")
        return reader.read(position, length)

    with reading(directory / "index", log_id) as (txn, databases):
        tables = {name: LmdbTable(database, txn) for name, database in databases.items()}
        yield Source(log_id, read_position(txn, databases), tables, read)


def main(arguments: Any) -> None:  # the command line
    """Until nothing is left to do, or whoever started this is gone."""
    os.nice(NICER)
    fs, directory, parent = RealFileSystem(), Path(arguments[1]), os.getppid()
    log_id = read_log_id(fs, str(directory))
    more = log_id is not None
    while more and log_id is not None:
        with _source(fs, directory, log_id, parent) as source:
            more = update(fs, str(directory), source)


if __name__ == "__main__":
    main(sys.argv)
