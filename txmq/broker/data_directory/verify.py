"""Verification of a log that no broker has open, or of an archive; nothing is changed.

`verify_log` reads every record. `verify_index` checks that table rows point at batches.
`LogFiles` gives the records to other offline tools.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from txmq.batch.header import FIELDS, LENGTH, MAGIC, PREFIX
from txmq.core.state.failed_rows import FailedMessage
from txmq.core.state.letter_edits import LetterVersion
from txmq.errors import StoreError
from txmq.model.measures import counted
from txmq.store import tables as t
from txmq.store.log.decoder import Damage, SegmentDecoder
from txmq.store.log.integrity import IntegrityChecker, KnownPositions
from txmq.store.log.reader import LogReader
from txmq.store.log.record import Record
from txmq.store.log.recovery import find_log
from txmq.store.log.segment import Segment, existing_segments, no_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.store.filesystem import FileSystem
    from txmq.store.tables import Tables

LostSpan = tuple[int, int]  # position in the log, end; given up by a repair


@dataclass(frozen=True, slots=True)
class LogReport:
    """The result of a verification: `records` from the position `first` to `end`.
    `torn` bytes after `end` were never finished; that is no damage, a start cuts them
    off. `lost` are the spans (position, end) that a repair gave up.
    """

    log_id: UUID
    first: int
    end: int
    segments: int
    records: int
    torn: int
    damaged: tuple[Damage, ...]
    lost: tuple[LostSpan, ...]


class MisplacedRow(NamedTuple):
    """A table row that points at no batch, or at another one; `key` in hexadecimal."""

    table: str
    key: str
    position: int
    reason: str


class LostMessages(NamedTuple):
    """Messages that are lost, because a repair gave up the log where their batch was:
    `count` from `offset` on. `group` has them as a failed message, "" = as published.
    `position` is that of the batch, or of the record that told of the loss.
    """

    topic: str
    partition: int
    offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    group: str
    position: int


def verify_log(fs: FileSystem, directory: str, *, durable: int = 0) -> LogReport:
    """Read every record of the log in a data directory, or in an archive.

    `durable`: the position up to which the log is known to have been on disk. Damage
    below it is damage, and not what a crash left unfinished. Raises StoreError where
    there is none, CorruptRecord where its beginning is missing.
    """
    segments = existing_segments(fs, directory)
    known = KnownPositions(scan_from=segments[0].first, durable=durable)
    found = find_log(fs, directory, known)
    if found is None:
        raise no_log(directory)
    damaged: list[Damage] = []
    survey = IntegrityChecker(fs, known, damaged.append).check(found.segments, found.sealed_at)
    if survey.missing is not None:
        damaged.append(survey.missing)
    last = found.segments[-1]
    torn = 0 if _blank(fs, last, survey.end) else max(0, last.end - survey.end)
    first = found.segments[0].first
    return LogReport(
        found.log_id,
        first,
        survey.end,
        len(found.segments),
        survey.records,
        torn,
        tuple(damaged),
        tuple(survey.lost),
    )


class LogFiles:
    """The records of a log that nothing changes. Damaged spans are skipped and
    collected in `damaged`.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs, self._segments = fs, existing_segments(fs, directory)
        self._reader = LogReader(fs, directory, [segment.first for segment in self._segments])
        self.damaged: list[Damage] = []

    @property
    def first(self) -> int:
        """The start of the first segment."""
        return self._segments[0].first

    @property
    def end(self) -> int:
        """The end of the last file, which may lie behind the last record."""
        return self._segments[-1].end

    def scan(self, start: int) -> Iterator[Record]:
        """Return the records from `start`, the position of one, to the end."""
        for segment in self._segments:
            if segment.end > start:
                yield from self._records(segment, max(start, segment.first))

    def read(self, position: int, length: int) -> bytes:
        """Return bytes at a position. Raises CorruptRecord and StoreError."""
        return self._reader.read(position, length)

    def _records(self, segment: Segment, start: int) -> Iterator[Record]:
        with closing(self._fs.open(segment.path)) as file:
            scan = SegmentDecoder(file, segment.first)
            for item in scan.scan(start, segment.end):
                if isinstance(item, Record):
                    yield item
                elif not scan.is_zero(item.position, item.end):
                    self.damaged.append(item)


def verify_index(
    files: LogFiles, tables: Tables, lost: Sequence[LostSpan] = ()
) -> Iterator[MisplacedRow | LostMessages]:
    """Return the rows of the tables whose batches are not where they should be. `lost`
    are the spans that a repair gave up, in the order of the log.
    """
    for table, key, position, length, count in chain(
        _entries(tables), _moved(tables), _edits(tables)
    ):
        if not length or _in_span(lost, position):
            yield _lost(tables, table, key, position, count)
        elif reason := _mismatch(files, position, length, count):
            yield MisplacedRow(table, key.hex(), position, reason)


def _lost(tables: Tables, table: str, key: bytes, position: int, count: int) -> LostMessages:
    if table == t.ENTRIES:
        group, (topic_id, partition, offset) = "", t.ENTRY_KEY.unpack(key)
    else:
        size = t.FAILED_KEY.size  # with which the key of an edit begins
        group_id, topic_id, partition, offset = t.FAILED_KEY.unpack(key[:size])
        group = _name(tables, t.GROUPS, t.GROUP_KEY.pack(group_id))
    topic = _name(tables, t.TOPICS, t.TICKET_KEY.pack(topic_id))
    return LostMessages(topic, partition, offset, count or 1, group, position)


def _name(tables: Tables, table: str, key: bytes) -> str:
    row: Any = tables[table].get(key)
    return "" if row is None else str(row[0])


def _in_span(spans: Sequence[LostSpan], position: int) -> bool:
    at = bisect_right(spans, position, key=itemgetter(0)) - 1
    return at >= 0 and position < spans[at][1]


def _entries(tables: Tables) -> Iterator[tuple[str, bytes, int, int, int]]:
    for key, row in tables[t.ENTRIES].range(b""):
        entry = t.BatchEntry._make(row)
        yield t.ENTRIES, key, entry.position, entry.length, entry.count


def _moved(tables: Tables) -> Iterator[tuple[str, bytes, int, int, int]]:
    rows: Any = tables[t.FAILED].range(b"")
    for key, raw in rows:
        row = FailedMessage(*raw)
        yield t.FAILED, key, row.position, row.length, 0


def _edits(tables: Tables) -> Iterator[tuple[str, bytes, int, int, int]]:
    rows: Any = tables[t.EDITS].range(b"")
    for key, raw in rows:
        version = LetterVersion(*raw)
        yield t.EDITS, key, version.position, version.length, 1


def _mismatch(files: LogFiles, position: int, length: int, count: int) -> str:
    """Return why the batch at a position is not the expected one; "" = it is."""
    try:
        start = files.read(position, min(length, LENGTH))
    except StoreError as error:
        return error.message
    if len(start) < LENGTH or not start.startswith(MAGIC):
        return "no batch begins here"
    _version, _codec, _columns, messages, size, *_others = FIELDS.unpack_from(start, PREFIX.size)
    if size != length or (count and messages != count):
        return f"a batch of {counted(messages, 'message')}, {size} bytes"
    return ""


def _blank(fs: FileSystem, segment: Segment, end: int) -> bool:
    with closing(fs.open(segment.path)) as file:
        return SegmentDecoder(file, segment.first).is_zero(end, segment.end)
