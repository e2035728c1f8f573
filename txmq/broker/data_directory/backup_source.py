"""The log of a stopped broker as the source of a backup."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgpack

from txmq.broker.data_directory.verify import LogFiles
from txmq.core.events.base import KINDS, LogRestored, decode
from txmq.core.persistence import RESTORES_ROW
from txmq.core.state.state import Restore
from txmq.store import tables as t
from txmq.store.backup import LogExtent
from txmq.store.log.integrity import IntegrityChecker, KnownPositions
from txmq.store.log.log import lock_directory
from txmq.store.log.record import split_body
from txmq.store.log.recovery import damage_error, find_log
from txmq.store.log.segment import existing_segments, read_log_id
from txmq.store.restore import require_served
from txmq.store.snapshot import newest_snapshot, read_rows, snapshot_positions

if TYPE_CHECKING:
    from txmq.store.filesystem import File, FileSystem
    from txmq.store.log.decoder import Damage
    from txmq.store.snapshot import Snapshot


class StoppedLog:
    """The log of a data directory that no broker uses, locked until `close`.

    Raises DirectoryInUse while a broker runs, StoreError where there is no log.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs, self._directory = fs, directory
        existing_segments(fs, directory)  # raises rather than make a directory
        require_served(fs, directory)
        self._lock = lock_directory(fs, directory)

    def hold(self, _position: int) -> LogExtent:
        """Return the extent of the log, all of which is on disk then. Raises
        CorruptRecord.
        """
        log_id = read_log_id(self._fs, self._directory)
        snapshot = None if log_id is None else newest_snapshot(self._fs, self._directory, log_id)
        at = 0 if snapshot is None else snapshot.position
        known = KnownPositions(at, at, at)
        found = find_log(self._fs, self._directory, known)
        assert found is not None, "there are segments"
        checked = IntegrityChecker(self._fs, known, _refuse).check(found.segments, found.sealed_at)
        if checked.missing is not None:
            _refuse(checked.missing)
        with closing(self._fs.open(found.segments[-1].path, write=True)) as tail:
            tail.fsync()
        return LogExtent(
            found.log_id,
            self._incarnation(snapshot, checked.scanned_from, checked.end),
            tuple(segment.first for segment in found.segments),
            checked.end,
            tuple(snapshot_positions(self._fs, self._directory)),
            time.time_ns() // 1_000,
        )

    def _incarnation(self, snapshot: Snapshot | None, start: int, end: int) -> UUID | None:
        found = None
        for table, key, row in () if snapshot is None else read_rows(self._fs, snapshot):
            if (table, key) == (t.META, RESTORES_ROW):
                restores: Any = msgpack.unpackb(row, use_list=False)
                found = Restore(*restores[-1]).incarnation
        for record in LogFiles(self._fs, self._directory).scan(start):
            if record.position >= end:
                break
            if record.kind == KINDS[LogRestored]:
                restored = decode(record.kind, split_body(record).head)
                assert isinstance(restored, LogRestored), "by its kind"
                found = restored.incarnation
        return None if found is None else UUID(bytes=found)

    def keep_holding(self, position: int) -> None:
        """Do nothing: the lock keeps the log."""

    def open(self, name: str) -> File:
        return self._fs.open(f"{self._directory}/{name}")

    def close(self) -> None:
        """Let a broker use the directory again."""
        self._lock.release()


def _refuse(damage: Damage) -> None:
    raise damage_error(damage)
