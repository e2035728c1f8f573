"""The broker's data directory: opened at start, kept in order while it runs.

    <data>/lock  <data>/log/*.seg  <data>/index/ (LMDB, a cache)  <data>/snapshot/*.snap

Start: tables as LMDB has them, or as the newest snapshot does, then every later record of the log through the same
`apply` that made them. While it runs, the tables' overlay is written to LMDB now and then, always behind what is
durable in the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.core import machine
from txmq.broker.core.events import Place, decode
from txmq.store.index import LmdbTables
from txmq.store.log import Log, lock_directory
from txmq.store.record import LOST, split_body
from txmq.store.segment import read_log_id
from txmq.store.snapshot import newest_snapshot, read_rows, write_snapshot
from txmq.store.survey import Known

if TYPE_CHECKING:
    from pathlib import Path

    from twisted.internet.defer import Deferred

    from txmq.broker.core.state import State
    from txmq.broker.engine import Engine
    from txmq.broker.seams import InThread
    from txmq.config import Broker as BrokerSettings
    from txmq.store.fs import FileSystem, Lock
    from txmq.store.index import Frozen
    from txmq.store.recovery import RecoveryReport


class Opened(NamedTuple):
    """A data directory in use, and what recovery had to do."""

    log: Log
    tables: LmdbTables
    state: State
    report: RecoveryReport
    replayed: int  # records applied on top of the tables


def open_directory(fs: FileSystem, settings: BrokerSettings, now: int) -> Opened:
    """Open or make the data directory. Raises what `Log.open` and `LmdbTables.open` raise."""
    directory = settings.data
    lock = lock_directory(fs, str(directory))
    try:
        return _open_locked(fs, directory, lock, settings, now)
    except BaseException:
        lock.release()
        raise


def _open_locked(fs: FileSystem, directory: Path, lock: Lock, settings: BrokerSettings, now: int) -> Opened:
    log_id = read_log_id(fs, str(directory))
    tables = None if log_id is None else LmdbTables.open(directory / "index", log_id=log_id)
    known = Known()
    if tables is not None and log_id is not None:
        snapshot = newest_snapshot(fs, str(directory), log_id)
        if snapshot is not None and tables.position < snapshot.position:
            tables.load(snapshot.position, read_rows(fs, snapshot))
        known = Known(tables.position, 0 if snapshot is None else snapshot.position, tables.position)
    log, report = Log.open(
        fs, str(directory), now=now, known=known, lock=lock,
        segment_size=settings.segment_bytes, preallocate=settings.preallocate_bytes,
    )  # fmt: skip
    if tables is None:
        tables = LmdbTables.open(directory / "index", log_id=log.log_id)
    state = machine.load(tables)
    return Opened(log, tables, state, report, roll_forward(state, log, tables.position))


def roll_forward(state: State, log: Log, position: int) -> int:
    """Apply every record of the log from `position` on; returns how many there were."""
    count = 0
    for record in log.scan(max(position, log.first)):
        if record.kind != LOST:
            body = split_body(record)
            place = Place(record.position, record.end, body.attachment_position, record.stored_at, record.boot_epoch)
            machine.apply(state, decode(record.kind, body.head), place)
            count += 1
    return count


class Keeper:
    """Brings the state tables to disk behind the log, makes snapshots, and keeps zeroed space ahead of the log's end.

    `tend` is called now and then by a timer of the reactor's; everything that blocks runs in one thread, one piece at
    a time.
    """

    def __init__(
        self, fs: FileSystem, engine: Engine, tables: LmdbTables, settings: BrokerSettings, in_thread: InThread
    ) -> None:
        self._fs, self._engine, self._tables, self._settings, self._in_thread = fs, engine, tables, settings, in_thread
        self._frozen: Frozen | None = None
        self._busy = False
        self._snapshot = tables.position

    def tend(self) -> None:
        """Start whatever is due, if nothing is under way."""
        log = self._engine.store
        if self._busy or self._engine.failed is not None:
            return
        if log.wants_room or log.read_only:
            self._run(log.try_space)  # a full disk is no failure: the log says read-only until there is space
        elif self._frozen is not None:
            if log.durable >= self._frozen.position:
                self._run(self._commit, self._frozen, log.durable).addCallback(lambda _: self._committed())
        elif log.end > self._tables.position:
            machine.save(self._engine.state)
            self._frozen = self._tables.freeze(log.end)
        elif self._tables.position - self._snapshot >= self._settings.snapshot_bytes:
            self._run(self._write_snapshot)

    @property
    def busy(self) -> bool:
        """Whether something of this runs in another thread."""
        return self._busy

    def _run(self, function: object, *args: object) -> Deferred[object]:
        self._busy = True
        work: Deferred[object] = self._in_thread(function, *args)  # type: ignore[arg-type]

        def over(result: object) -> object:
            self._busy = False
            return result

        return work.addBoth(over).addErrback(self._engine.fail)

    def _commit(self, frozen: Frozen, durable: int) -> None:
        self._tables.commit(frozen, durable=durable)

    def _committed(self) -> None:
        frozen, self._frozen = self._frozen, None
        if frozen is not None and frozen.committed:
            self._tables.release(frozen)
            self._run(frozen.clear)

    def _write_snapshot(self) -> None:
        with self._tables.dump() as (position, rows):
            write_snapshot(self._fs, str(self._settings.data), self._engine.store.log_id, position, rows)
        self._snapshot = position

    def close(self) -> None:
        """Bring everything to disk; blocks. The engine has settled, and nothing of this runs in another thread."""
        if self._frozen is None:
            machine.save(self._engine.state)
            self._frozen = self._tables.freeze(self._engine.store.end)
        if self._frozen is not None and not self._frozen.committed:
            self._tables.commit(self._frozen, durable=self._engine.store.durable)
            self._tables.release(self._frozen)
        self._tables.close()
