"""The restore of a log from a backup, as another incarnation.

The log keeps its id, so that inboxes know its messages. A record says where it has left
the incarnation before, so that nobody takes it for the log that went on from there.

The backup of a shared log also begins the copy of another node. That is no incarnation:
the node goes on with what the partition has.
"""

from __future__ import annotations

import time
from secrets import randbelow
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID, uuid4

from txmq.core.events.base import KINDS, LogRestored, encode
from txmq.crashpoints import crashpoint
from txmq.model.units import SECOND
from txmq.store import restore
from txmq.store.index.environment import remove_environment
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log, lock_directory
from txmq.store.restore import RestorePoint, Until

if TYPE_CHECKING:
    from pathlib import Path

    from txmq.config.broker import BrokerSettings
    from txmq.store.backup import Watch
    from txmq.store.filesystem import FileLock, FileSystem

EVERYTHING = Until()


class RestoreReport(NamedTuple):
    """A restored log: its new incarnation, and the point at which it has left the one
    before; None for the copy of a node. `stored_to` is the time of the last record
    before.
    """

    log_id: UUID
    incarnation: UUID | None
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
    """Make a data directory from a backup, or with `is_shared` the copy of a node.

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
        incarnation = None if is_shared else _begin_incarnation(fs, settings, lock, point, at)
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
