"""Index of a stopped broker: compared with the log, and rebuilt."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from txmq.broker.data_directory.storage import open_directory, roll_forward, write_tables
from txmq.broker.data_directory.verify import (
    LogFiles,
    LostMessages,
    MisplacedRow,
    verify_index,
    verify_log,
)
from txmq.core import machine
from txmq.core.topics import lost_batches
from txmq.store.catalogue.catalogue import remove_catalogues
from txmq.store.index.digest import RESERVED, find_damage
from txmq.store.index.environment import has_environment, remove_environment
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.log.log import lock_directory
from txmq.store.log.recovery import missing_end_error
from txmq.store.log.segment import existing_segments, read_log_id
from txmq.store.snapshot import newest_snapshot, read_rows, set_aside_snapshots, write_snapshot
from txmq.store.tables import NAMES, MemoryTables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from txmq.broker.data_directory.verify import LostSpan
    from txmq.config.broker import BrokerSettings
    from txmq.store.filesystem import FileSystem
    from txmq.store.tables import Tables

# rows that are named; where there are more, there is one reason for all of them
MAX_ROWS_NAMED = 100


class IndexReport(NamedTuple):
    """The state of an index that stands for log position `position`. `misplaced` rows
    point at no batch; `different` rows are not those of the log. `lost` is no damage.
    """

    position: int
    rows: int
    misplaced: tuple[MisplacedRow, ...]
    different: tuple[str, ...]
    lost: tuple[LostMessages, ...] = ()


class RebuildReport(NamedTuple):
    """A rebuilt index: from the snapshot at `snapshot` (0 = from the log alone) and the
    records after it.
    """

    snapshot: int
    records: int
    position: int


def check_index(
    fs: FileSystem, data: Path, log_id: UUID, *, lost: Sequence[LostSpan] = (), deep: bool
) -> IndexReport | None:
    """Compare the index with the log; with `deep`, also with a rebuilt one. None =
    there is no index. `lost` are the spans of the log that a repair gave up.

    A damaged index stays as it is. Takes the directory's lock. Raises DirectoryInUse
    while a broker runs.
    """
    if not has_environment(data / "index"):
        return None
    lock = lock_directory(fs, str(data))
    try:
        damage = find_damage(data / "index")
        if damage:
            return IndexReport(0, 0, (), (f"{damage}; the broker makes the index anew",))
        tables = LmdbTables.open(data / "index", log_id=log_id)
        files = LogFiles(fs, str(data))
        rows = sum(1 for name in NAMES for _row in tables[name].range(b""))
        found = list(islice(verify_index(files, tables, lost), MAX_ROWS_NAMED))
        different = tuple(_differences(fs, data, log_id, files, tables)) if deep else ()
        if tables.rebuilt:
            different = (f"the index was unusable and is empty now: {tables.reason}", *different)
        position = tables.position
        tables.close()
    finally:
        lock.release()
    misplaced = tuple(row for row in found if isinstance(row, MisplacedRow))
    # a letter that was edited may have several rows
    given_up = dict.fromkeys(row for row in found if isinstance(row, LostMessages))
    return IndexReport(position, rows, misplaced, different, tuple(given_up))


def durable_position(fs: FileSystem, data: Path) -> int:
    """Return the position that index and snapshots prove the log to have reached, 0 for
    an archive, which has neither.

    Raises DirectoryInUse.
    """
    log_id = read_log_id(fs, str(data))
    if log_id is None or not any((data / name).exists() for name in ("index", "snapshot")):
        return 0
    lock = lock_directory(fs, str(data))
    try:
        position = 0
        if has_environment(data / "index") and not find_damage(data / "index"):
            tables = LmdbTables.open(data / "index", log_id=log_id)
            position = tables.position
            tables.close()
        snapshot = newest_snapshot(fs, str(data), log_id)
        return max(position, 0 if snapshot is None else snapshot.position)
    finally:
        lock.release()


def _differences(
    fs: FileSystem, data: Path, log_id: UUID, files: LogFiles, tables: LmdbTables
) -> list[str]:
    """Return the rows that a rebuild would make otherwise; none where neither a
    snapshot nor the whole log is there for one.
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
    return found[:MAX_ROWS_NAMED]


_RESERVED = {("meta", key) for key in RESERVED}


def _plain(row: object) -> bytes:
    """Return a row as it is stored, where named tuples and lists are arrays alike."""
    return bytes(msgpack.packb(row))


def rebuild(
    fs: FileSystem, settings: BrokerSettings, now: int, *, copy: bool = False
) -> RebuildReport:
    """Remove the index and make it anew from the newest snapshot and the log. The
    broker makes new catalogues by itself.

    `copy`: the directory was copied while its broker ran, so that index and snapshots
    may stand for more than the log has; what the log has is all there is. Raises
    DirectoryInUse while a broker runs, StoreError where there is no log, CorruptRecord
    where the log ends too early for a directory that is no copy, and what
    `open_directory` raises.
    """
    existing_segments(fs, str(settings.data))  # raises rather than make a new log
    durable = durable_position(fs, settings.data)
    found = verify_log(fs, str(settings.data), durable=0 if copy else durable)
    if not copy and found.end < durable:
        raise missing_end_error(found.damaged[-1])
    set_aside_snapshots(fs, str(settings.data), found.end)
    lock = lock_directory(fs, str(settings.data))
    try:
        remove_environment(settings.data / "index")
        remove_catalogues(fs, str(settings.data))
    finally:
        lock.release()
    opened = open_directory(fs, settings, now)
    # The snapshot knows what was lost before it; `apply` meets the later losses.
    lost = [span for span in found.lost if span[1] <= opened.indexed]
    if lost:
        lost_batches.give_up(opened.state, lost)
    machine.save(opened.state)
    write_tables(opened.tables, opened.log.end, durable=opened.log.durable)
    position = opened.tables.position
    if lost:  # or the next rebuild would begin with the lost batches again
        with opened.tables.dump() as (end, rows):
            write_snapshot(fs, str(settings.data), opened.log.log_id, end, rows)
    opened.tables.close()
    opened.log.close()
    return RebuildReport(opened.indexed, opened.replayed, position)
