"""Reading the log of a broker that is stopped, or an archive, without changing
anything: all of it, checked.

`verify_log` reads every record; `verify_index` asks whether what the tables point at is
there. A `LogFiles` gives the records to whoever folds or prints them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from txmq.batch.header import FIELDS, LENGTH, MAGIC, PREFIX
from txmq.core.consumers.failed_messages import Moved
from txmq.errors import StoreError
from txmq.store import tables as t
from txmq.store.reader import LogReader
from txmq.store.record import Record
from txmq.store.recovery import find_log
from txmq.store.scan import Damage, SegmentScan
from txmq.store.segment import Segment, existing_segments, no_log
from txmq.store.survey import Known, Surveyor

if TYPE_CHECKING:
    from txmq.store.fs import FileSystem
    from txmq.store.tables import Tables


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found: `records` from the position `first` to `end`. `torn` bytes after
    that were never finished, which is no damage: a start cuts them.
    """

    log_id: UUID
    first: int
    end: int
    segments: int
    records: int
    torn: int
    damaged: tuple[Damage, ...]


class Misplaced(NamedTuple):
    """A row of a table that points at nothing, or at something else; `key` in
    hexadecimal.
    """

    table: str
    key: str
    position: int
    reason: str


def verify_log(fs: FileSystem, directory: str) -> Verified:
    """Read every record of the log in a data directory, or in an archive.

    Raises StoreError where there is none, CorruptRecord where its beginning is missing.
    """
    segments = existing_segments(fs, directory)
    known = Known(scan_from=segments[0].first)
    found = find_log(fs, directory, known)
    if found is None:
        raise no_log(directory)
    damaged: list[Damage] = []
    survey = Surveyor(fs, known, damaged.append).survey(found.segments, found.sealed_at)
    last = found.segments[-1]
    torn = 0 if _blank(fs, last, survey.end) else max(0, last.end - survey.end)
    first = found.segments[0].first
    return Verified(
        found.log_id, first, survey.end, len(found.segments), survey.records, torn, tuple(damaged)
    )


class LogFiles:
    """The records of a log that nobody changes. Damaged spans are passed over, and kept
    in `damaged`.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs, self._segments = fs, existing_segments(fs, directory)
        self._reader = LogReader(fs, directory, [segment.first for segment in self._segments])
        self.damaged: list[Damage] = []

    @property
    def first(self) -> int:
        """The position that the first segment begins at."""
        return self._segments[0].first

    @property
    def end(self) -> int:
        """The position that the last file ends at; what is written there may be
        nothing.
        """
        return self._segments[-1].end

    def scan(self, start: int) -> Iterator[Record]:
        """The records from a position, where one begins, to the end."""
        for segment in self._segments:
            if segment.end > start:
                yield from self._records(segment, max(start, segment.first))

    def read(self, position: int, length: int) -> bytes:
        """Bytes at a position. Raises CorruptRecord and StoreError where there are
        none.
        """
        return self._reader.read(position, length)

    def _records(self, segment: Segment, start: int) -> Iterator[Record]:
        with closing(self._fs.open(segment.path)) as file:
            scan = SegmentScan(file, segment.first)
            for item in scan.walk(start, segment.end):
                if isinstance(item, Record):
                    yield item
                elif not scan.blank(item.position, item.end):
                    self.damaged.append(item)


def verify_index(files: LogFiles, tables: Tables) -> Iterator[Misplaced]:
    """Rows of the tables whose messages are not where they say."""
    for table, key, position, length, count in chain(_entries(tables), _moved(tables)):
        reason = _unlike(files, position, length, count)
        if reason:
            yield Misplaced(table, key.hex(), position, reason)


def _entries(tables: Tables) -> Iterator[tuple[str, bytes, int, int, int]]:
    for key, row in tables[t.ENTRIES].range(b""):
        entry = t.Entry._make(row)
        yield t.ENTRIES, key, entry.position, entry.length, entry.count


def _moved(tables: Tables) -> Iterator[tuple[str, bytes, int, int, int]]:
    rows: Any = tables[t.MOVED].range(b"")
    for key, raw in rows:
        row = Moved(*raw)
        yield t.MOVED, key, row.position, row.length, 0


def _unlike(files: LogFiles, position: int, length: int, count: int) -> str:
    """Why the batch at a position is not the one that is meant; "" = it is."""
    try:
        start = files.read(position, min(length, LENGTH))
    except StoreError as error:
        return error.message
    if len(start) < LENGTH or not start.startswith(MAGIC):
        return "no batch begins here"
    _version, _codec, _columns, messages, size, *_others = FIELDS.unpack_from(start, PREFIX.size)
    if size != length or (count and messages != count):
        return f"a batch of {messages} messages, {size} bytes"
    return ""


def _blank(fs: FileSystem, segment: Segment, end: int) -> bool:
    with closing(fs.open(segment.path)) as file:
        return SegmentScan(file, segment.first).blank(end, segment.end)
