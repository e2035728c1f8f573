"""The restore of a log from a backup, as another incarnation.

The log keeps its id, so that inboxes know its messages. A record says where it has left
the incarnation before, so that nobody takes it for the log that went on from there.

A restored log may go on in a partition of its own. The directory is then the copy of a
node that has read the partition's first record, and no other: the genesis.
"""

from __future__ import annotations

import time
from secrets import randbelow
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID, uuid4

from txmq.broker.data_directory.storage import open_locked, write_tables
from txmq.core import machine
from txmq.core.events.base import KINDS, LogRestored, encode
from txmq.crashpoints import crashpoint
from txmq.model.units import SECOND
from txmq.store import restore
from txmq.store.index.environment import has_environment, remove_environment
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log, lock_directory
from txmq.store.log.segment import read_log_id
from txmq.store.restore import RestorePoint, Until
from txmq.store.shared.records import Genesis, checksum_of
from txmq.store.shared.records import encode as encode_record
from txmq.store.shared.rules import Place, fold
from txmq.store.shared.stored_place import load_place, save_place
from txmq.store.snapshot import write_snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from txmq.config.broker import BrokerSettings
    from txmq.store.backup import Watch
    from txmq.store.filesystem import FileLock, FileSystem

EVERYTHING = Until()


class RestoreReport(NamedTuple):
    """A restored log: its new incarnation, and the point at which it has left the one
    before. `stored_to` is the time of the last record before.
    """

    log_id: UUID
    incarnation: UUID
    position: int
    stored_to: int
    left_out_bytes: int  # of the backup, behind the point


def restore_log(
    fs: FileSystem,
    backup: Path,
    settings: BrokerSettings,
    watch: Watch,
    until: Until = EVERYTHING,
    now: int | None = None,
    *,
    is_shared: bool = False,
) -> RestoreReport:
    """Make a data directory from a backup; with `is_shared` that of a node, whose
    partition begins as `shared_genesis` says.

    Raises BackupDamaged, BackupMismatch, UnsupportedFormat, DirectoryInUse, DiskFull.
    An interrupted restore is begun anew by the next one.
    """
    source, target = str(backup), str(settings.data)
    manifest = restore.open_backup(fs, source)
    # Later than all of the backup, and another one than that of any other restore from
    # it, whatever the clock says.
    at = max(time.time_ns() // 1_000 if now is None else now, manifest.taken_at)
    at += 1 + randbelow(SECOND)
    restore.require_empty(fs, target)
    watch.begin(2 * sum(file.size for file in manifest.files))
    restore.require_whole(fs, source, manifest, watch)
    point = restore.find_point(fs, source, manifest, until)
    restore.needed_files(manifest, point.position)  # raises before anything is written
    lock = lock_directory(fs, target)
    try:
        restore.begin(fs, source, target)
        remove_environment(settings.data / "index")
        restore.copy_files(fs, source, target, manifest, point.position, watch)
        crashpoint("restore.before_incarnation")
        incarnation = _begin_incarnation(fs, settings, lock, point, at)
        if is_shared:
            _begin_copy(fs, settings, lock, at)
        crashpoint("restore.after_incarnation")
        restore.end(fs, target)
    finally:
        lock.release()
    return RestoreReport(
        manifest.log_id,
        incarnation,
        point.position,
        point.stored_at,
        manifest.end - point.position,
    )


def _begin_incarnation(
    fs: FileSystem, settings: BrokerSettings, lock: FileLock, point: RestorePoint, at: int
) -> UUID:
    """Append the record of the restore, durably."""
    incarnation = uuid4()
    log, _report = Log.open(
        fs,
        str(settings.data),
        now=at,
        positions=KnownPositions(point.position, 0, point.position),
        lock=lock,
        segment_size=settings.segment_bytes,
        preallocate=settings.preallocate_bytes,
    )
    try:
        # Counts of starts stay far below seconds: none of the lost part is above.
        boot_epoch = max(at // SECOND, point.boot_epoch + 1)
        event = LogRestored(incarnation.bytes, at, point.stored_at, boot_epoch)
        log.append(
            KINDS[LogRestored], encode(event), stored_at=point.stored_at, boot_epoch=boot_epoch
        )
        flush = log.cut()
        assert flush is not None, "a record was appended"
        log.write(flush)
        log.complete(flush)
    finally:
        log.close()
    return incarnation


def _begin_copy(fs: FileSystem, settings: BrokerSettings, lock: FileLock, at: int) -> None:
    """Let the restored log be the copy of a node that has read the genesis."""
    log, tables, state, *_ = open_locked(fs, settings, lock, at)
    try:
        genesis = Genesis(log.log_id, state.boot_epoch, log.end, 0)
        place, _counts = fold(Place(), 0, checksum_of(encode_record(genesis)), genesis)
        save_place(tables, place)
        machine.save(state)
        write_tables(tables, log.end, durable=log.durable)
        with tables.dump() as (position, rows):
            write_snapshot(fs, str(settings.data), log.log_id, position, rows)
    finally:
        tables.close()
        log.close()


def shared_genesis(fs: FileSystem, data: Path) -> Genesis | None:
    """Return how the partition of a restored log begins, from the directory of the node
    that has restored it and has not been started; None for other directories.
    """
    log_id = read_log_id(fs, str(data))
    if log_id is None or not has_environment(data / "index"):
        return None
    tables = LmdbTables.open(data / "index", log_id=log_id)
    place = load_place(tables)
    tables.close()
    if place is None or place.offset or not place.epoch:
        return None
    return Genesis(log_id, place.epoch, place.end, 0)
