"""What can be done with the data directory of a broker that is stopped: its index
compared, and made anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from txmq.broker.data_directory.storage import open_directory, roll_forward
from txmq.broker.data_directory.verify import LogFiles, Misplaced, verify_index
from txmq.core import machine
from txmq.store.catalogue import remove_catalogues
from txmq.store.environment import remove_environment
from txmq.store.index import LmdbTables
from txmq.store.log import lock_directory
from txmq.store.segment import existing_segments, read_log_id
from txmq.store.snapshot import newest_snapshot, read_rows
from txmq.store.tables import NAMES, MemoryTables

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.config.broker import Broker
    from txmq.store.fs import FileSystem
    from txmq.store.tables import Tables

SHOWN = 100  # rows that are named; where there are more, there is one reason for all of them


class IndexReport(NamedTuple):
    """The index stands for `position`; `misplaced` rows point at nothing, `different`
    ones are not the log's.
    """

    position: int
    rows: int
    misplaced: tuple[Misplaced, ...]
    different: tuple[str, ...]


class Rebuilt(NamedTuple):
    """The index was made anew: from the snapshot at `snapshot` (0 = from the log alone)
    and the records after it.
    """

    snapshot: int
    records: int
    position: int


def check_index(fs: FileSystem, data: Path, log_id: UUID, *, deep: bool) -> IndexReport | None:
    """Compare the index with the log; `deep`: with what a rebuild would make of it.
    None = there is no index.

    Takes the directory's lock. Raises DirectoryInUse while a broker runs.
    """
    if not (data / "index" / "data.mdb").exists():
        return None
    lock = lock_directory(fs, str(data))
    try:
        tables = LmdbTables.open(data / "index", log_id=log_id)
        files = LogFiles(fs, str(data))
        rows = sum(1 for name in NAMES for _row in tables[name].range(b""))
        misplaced = tuple(
            found for _number, found in zip(range(SHOWN), verify_index(files, tables), strict=False)
        )
        different = tuple(_different(fs, data, log_id, files, tables)) if deep else ()
        if tables.rebuilt:
            different = (f"the index was of no use, and is empty now: {tables.reason}", *different)
        position = tables.position
        tables.close()
    finally:
        lock.release()
    return IndexReport(position, rows, misplaced, different)


def known_durable(fs: FileSystem, data: Path) -> int:
    """The position that index and snapshots know the log to have reached. Raises
    DirectoryInUse.
    """
    log_id = read_log_id(fs, str(data))
    if log_id is None:
        return 0
    lock = lock_directory(fs, str(data))
    try:
        position = 0
        if (data / "index" / "data.mdb").exists():
            tables = LmdbTables.open(data / "index", log_id=log_id)
            position = tables.position
            tables.close()
        snapshot = newest_snapshot(fs, str(data), log_id)
        return max(position, 0 if snapshot is None else snapshot.position)
    finally:
        lock.release()


def _different(
    fs: FileSystem, data: Path, log_id: UUID, files: LogFiles, tables: LmdbTables
) -> list[str]:
    """What a rebuild would make otherwise; nothing where neither a snapshot nor the
    whole log tells what it would.
    """
    made: Tables = MemoryTables()
    snapshot = newest_snapshot(fs, str(data), log_id)
    start = 0
    if snapshot is None or snapshot.position > tables.position:
        if files.first:
            return []
    else:
        start = snapshot.position
        for name, key, value in read_rows(fs, snapshot):
            made[name].put(key, msgpack.unpackb(value, use_list=False, strict_map_key=False))
    state = machine.load(made)
    roll_forward(state, files, start, tables.position)
    machine.save(state)
    found = []
    for name in NAMES:
        ours = {
            key: _plain(row) for key, row in tables[name].range(b"") if (name, key) not in _RESERVED
        }
        theirs = {key: _plain(row) for key, row in made[name].range(b"")}
        keys = sorted(
            key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
        )
        found += [f"{name} {key.hex()}" for key in keys]
    return found[:SHOWN]


_RESERVED = {("meta", key) for key in (b"version", b"log_id", b"position")}


def _plain(row: object) -> bytes:
    """As it is stored: named tuples and lists are arrays alike."""
    return bytes(msgpack.packb(row))


def rebuild(fs: FileSystem, settings: Broker, now: int) -> Rebuilt:
    """Throw the index away and make it anew from the newest snapshot and the log;
    catalogues are made by the broker.

    Raises DirectoryInUse while a broker runs, StoreError where there is no log, and
    what opening the directory raises.
    """
    existing_segments(fs, str(settings.data))  # or the index would be that of a new log, made here
    lock = lock_directory(fs, str(settings.data))
    try:
        remove_environment(settings.data / "index")
        remove_catalogues(fs, str(settings.data))
    finally:
        lock.release()
    opened = open_directory(fs, settings, now)
    snapshot = opened.tables.position
    machine.save(opened.state)
    frozen = opened.tables.freeze(opened.log.end)
    if frozen is not None:
        opened.tables.commit(frozen, durable=opened.log.durable)
        opened.tables.release(frozen)
    position = opened.tables.position
    opened.tables.close()
    opened.log.close()
    return Rebuilt(snapshot, opened.replayed, position)
