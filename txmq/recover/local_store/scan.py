"""Read-only views of local stores, for an operator on the machine.

They take no lock and write nothing below the store: they work beside a live owner, on
a copy, and on a disk that is mounted read-only. What they need to know of a store is
folded from its log into an index in a temporary directory. It begins as a copy of the
store's own index, where that was closed as it should be.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from txmq.errors import CorruptRecord, StoreError
from txmq.recover.local_store.directory import IDENTITY, QUARANTINE, read_identity
from txmq.recover.local_store.index import LAYOUT, MAP_SIZE, copy_sealed
from txmq.recover.local_store.opening import Sizes, commit_index
from txmq.recover.local_store.records import LyingRecord, decode_message
from txmq.recover.local_store.state import StoreState, entry_of
from txmq.recover.local_store.values import Scanned, StoreSummary
from txmq.store.filesystem import RealFileSystem
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.log.reader import LogReader
from txmq.store.log.record import Record
from txmq.store.log.segment import list_segments

if TYPE_CHECKING:
    from txmq.recover.local_store.values import StoreIdentity
    from txmq.store.log.segment import Segment

TRIES = 5  # a live owner may remove segments meanwhile


def existing_identity(directory: str) -> StoreIdentity:
    """Return the identity of the store in a directory.

    Raises StoreError where there is none.
    """
    identity = read_identity(RealFileSystem(), directory) if Path(directory).is_dir() else None
    if identity is None:
        raise StoreError(
            f"{directory}: there is no local store",
            hint="give the directory of one store: `txmq recover list --data DIR` names them",
        )
    return identity


def scan(directory: str) -> Iterator[Scanned]:
    """Yield what the store in a directory holds, by place.

    Raises StoreError where there is no store. Unreadable spans of the log are passed
    over: opening the store reports them (`StoreReport.damages`).
    """
    identity = existing_identity(directory)
    for attempt in range(TRIES):
        with TemporaryDirectory(prefix="txmq-scan-") as temporary:
            path = Path(temporary) / "index"
            copy_sealed(Path(directory) / "index", path)
            tables = LmdbTables.open(path, log_id=identity.id, map_size=MAP_SIZE, layout=LAYOUT)
            with closing(tables):
                try:
                    reader, state, first = _fold(directory, identity, tables)
                except (FileNotFoundError, StoreError) as error:
                    if attempt < TRIES - 1 and _is_missing(error):
                        continue
                    raise
                yield from _messages(reader, state, first)
                return


def stores_below(directory: str) -> list[StoreSummary]:
    """Return the stores below the directory that a user has named for them."""
    return [
        summary(str(path))
        for group in _folders(Path(directory))
        for path in _folders(group)
        if "@" in path.name and not _is_blank(path)
    ]


def _is_blank(path: Path) -> bool:
    """Return whether a process died before it had made the store that it began."""
    with suppress(OSError):
        return {found.name for found in path.iterdir()} <= {"lock", f"{IDENTITY}.new"}
    return False


def summary(directory: str) -> StoreSummary:
    """Return what can be seen of a store without reading its log."""
    identity, problem = None, ""
    try:
        identity = existing_identity(directory)
    except StoreError as error:
        problem = str(error)
    return StoreSummary(
        directory,
        identity,
        problem,
        _owner_pid(directory),
        _size(directory),
        _quarantined(directory),
    )


def _fold(
    directory: str, identity: StoreIdentity, tables: LmdbTables
) -> tuple[LogReader, StoreState, float]:
    """Return the log, what is known of its messages, and where it begins."""
    fs = RealFileSystem()
    segments = list_segments(fs, directory)
    reader = LogReader(fs, directory, [segment.first for segment in segments])
    owner = identity.owner
    state = StoreState(tables, reader.segment_of, owner.topic_id, ordered=owner.ordered)
    for record in _records(reader, segments, tables.position):
        with suppress(LyingRecord):
            state.apply(record)
        if tables.overlay_rows >= Sizes().rows:
            commit_index(tables, state, record.end)
    return reader, state, segments[0].first if segments else inf


def _records(reader: LogReader, segments: list[Segment], start: int) -> Iterator[Record]:
    for segment in segments:
        first = max(start, segment.first)
        if first < segment.end:
            for item in reader.decoder(segment.first).scan(first, segment.end):
                if isinstance(item, Record):
                    yield item


def _messages(reader: LogReader, state: StoreState, first: float) -> Iterator[Scanned]:
    for place, row in state.rows():
        message = None
        if row.whole and row.position >= first:
            with suppress(CorruptRecord, LyingRecord):
                message = decode_message(reader.record_at(row.position))
            if message is not None:
                message = message._replace(attempt=row.attempt)
        yield Scanned(entry_of(place, row), message)


def _is_missing(error: Exception) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.ENOENT


def _folders(path: Path) -> list[Path]:
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror}",
            hint="give the directory that consumers were given as `local_store`",
        ) from error
    return [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]


def _owner_pid(directory: str) -> int:
    """Return the process that has the store open, 0 without one."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released with the descriptor
        return 0
    except BlockingIOError:
        with suppress(OSError, ValueError):
            return int(Path(directory, "lock").read_bytes()[:32])
        return -1
    finally:
        os.close(fd)


def _quarantined(directory: str) -> int:
    return len(list(Path(directory, QUARANTINE).glob("*.jsonl")))


def _size(directory: str) -> int:
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                size += Path(folder, name).lstat().st_blocks * 512
    return size
