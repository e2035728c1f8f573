"""The broker's data directory: opened at start, kept in order while it runs.

    <data>/lock  <data>/log/*.seg  <data>/index/ (LMDB, a cache)  <data>/snapshot/*.snap  <data>/ballast

Start: tables as LMDB has them, or as the newest snapshot does, then every later record
of the log through the same `apply` that made them. While it runs, the tables' overlay
is written to LMDB now and then, always behind what is durable in the log.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

import structlog
from twisted.python.failure import Failure

from txmq.core import machine
from txmq.core.events.base import Event, Place, decode
from txmq.core.transactions import lost_records
from txmq.core.transactions.timers import NoteSnapshot
from txmq.errors import DiskFull
from txmq.store.archive import archive_segment
from txmq.store.index import LmdbTables
from txmq.store.log import Log, lock_directory
from txmq.store.record import LOST, split_body
from txmq.store.segment import read_log_id
from txmq.store.snapshot import newest_snapshot, older_snapshot, read_rows, write_snapshot
from txmq.store.survey import Known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twisted.internet.defer import Deferred

    from txmq.broker.data_directory.retention_service import Retaining
    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import InThread
    from txmq.config.broker import Broker as BrokerSettings
    from txmq.core.state.state import State
    from txmq.store.fs import FileSystem, Lock
    from txmq.store.index import Frozen
    from txmq.store.record import Record
    from txmq.store.recovery import RecoveryReport
    from txmq.store.segment import SegmentInfo

TROUBLE_PAUSE = 25  # calls of `tend`: 5 s


class Opened(NamedTuple):
    """A data directory in use, and what recovery had to do."""

    log: Log
    tables: LmdbTables
    state: State
    report: RecoveryReport
    replayed: int  # records applied on top of the tables


def open_directory(fs: FileSystem, settings: BrokerSettings, now: int) -> Opened:
    """Open or make the data directory. Raises what `Log.open` and `LmdbTables.open`
    raise.
    """
    directory = settings.data
    lock = lock_directory(fs, str(directory))
    try:
        return _open_locked(fs, directory, lock, settings, now)
    except BaseException:
        lock.release()
        raise


def _open_locked(
    fs: FileSystem, directory: Path, lock: Lock, settings: BrokerSettings, now: int
) -> Opened:
    with ExitStack() as opened:
        log_id = read_log_id(fs, str(directory))
        tables = None if log_id is None else LmdbTables.open(directory / "index", log_id=log_id)
        known = Known()
        if tables is not None and log_id is not None:
            opened.callback(tables.close)
            snapshot = newest_snapshot(fs, str(directory), log_id)
            if snapshot is not None and tables.position < snapshot.position:
                tables.load(snapshot.position, read_rows(fs, snapshot))
            known = Known(
                tables.position, 0 if snapshot is None else snapshot.position, tables.position
            )
        log, report = Log.open(
            fs, str(directory), now=now, known=known, lock=lock,
            segment_size=settings.segment_bytes, preallocate=settings.preallocate_bytes,
        )  # fmt: skip
        if tables is None:
            tables = LmdbTables.open(directory / "index", log_id=log.log_id)
        state = machine.load(tables)
        replayed = roll_forward(state, log, tables.position)
        opened.pop_all()
    return Opened(log, tables, state, report, replayed)


class Scans(Protocol):
    """A log to be read: one that is open, or its files."""

    @property
    def first(self) -> int: ...
    def scan(self, start: int) -> Iterator[Record]: ...


def roll_forward(state: State, log: Scans, position: int, end: int | None = None) -> int:
    """Apply every record of the log from `position` on, up to `end`; returns how many
    there were.
    """
    count = 0
    for record in log.scan(max(position, log.first)):
        if end is not None and record.position >= end:
            break
        if record.kind == LOST:
            lost_records.apply_lost(state, record.end)
        else:
            body = split_body(record)
            place = Place(
                record.position,
                record.end,
                body.attachment_position,
                record.stored_at,
                record.boot_epoch,
            )
            _roll(state, decode(record.kind, body.head), place)
            count += 1
    return count


def _roll(state: State, event: Event, place: Place) -> None:
    if not state.lost_to:
        machine.apply(state, event, place)
    elif not machine.apply_beyond(state, event, place):
        structlog.get_logger().error(
            "recover.left_out", event=type(event).__name__, position=place.position
        )


class Keeper:
    """Brings the state tables to disk behind the log, makes snapshots, removes segments
    that nobody needs, and keeps zeroed space ahead of the log's end.

    `tend` is called now and then by a timer of the reactor's; everything that blocks
    runs in one thread, one piece at a time. A disk that is full, or an archive that
    takes nothing, is no failure: it is told of (`Disk.troubles`), and tried again;
    where the broker itself needs space to go on, the ballast is given up.
    """

    def __init__(
        self,
        fs: FileSystem,
        engine: Engine,
        tables: LmdbTables,
        settings: BrokerSettings,
        in_thread: InThread,
    ) -> None:
        self._fs, self._engine, self._tables, self._settings, self._in_thread = (
            fs,
            engine,
            tables,
            settings,
            in_thread,
        )
        self._frozen: Frozen | None = None
        self._busy = False
        self._snapshot = tables.position
        self._older = older_snapshot(fs, str(settings.data))
        self._released: list[SegmentInfo] = []  # of the log, and not removed yet
        self._retaining: Retaining | None = None
        self._archive = ""
        self._pause = 0  # calls of `tend` to let pass after trouble
        self._looked = False  # for space, in the call before

    def remove_for(self, retaining: Retaining, archive: str) -> None:
        """From now on remove what that says is needed no longer, or move it to the
        folder `archive`.
        """
        self._retaining, self._archive = retaining, archive

    def tend(self) -> None:
        """Start whatever is due, if nothing is under way."""
        log = self._engine.store
        if self._busy or self._engine.failed is not None:
            return
        self._looked = (log.wants_room or log.read_only) and not (log.read_only and self._looked)
        if self._looked:  # and in turns with it, on a full disk, whatever frees space
            self._run("", self._find_space)
        elif self._pause:
            self._pause -= 1
        elif self._frozen is not None:
            if log.durable >= self._frozen.position:
                work = self._run("index", self._commit, self._frozen, log.durable)
                work.addCallback(lambda _: self._committed())
        else:
            self._tend_files()

    def _tend_files(self) -> None:
        log, disk = self._engine.store, self._engine.disk
        if self._tables.position - self._snapshot >= self._snapshot_due():
            self._run("snapshot", disk.insist, self._write_snapshot)
        elif self._release():
            self._run(
                "retention", self._remove, self._retaining is not None and self._retaining.archives
            )
        elif log.end == self._snapshot and self._held():
            self._engine.submit(NoteSnapshot(self._snapshot), lambda _reply: None)
        elif (
            disk.roomy
            and disk.ballast is not None
            and disk.ballast.wanted
            and log.end > self._settings.segment_bytes
        ):
            self._run("ballast", disk.ballast.make)
        elif log.end > self._tables.position:
            machine.save(self._engine.state)
            self._frozen = self._tables.freeze(log.end)

    @property
    def busy(self) -> bool:
        """Whether something of this runs in another thread."""
        return self._busy

    def _run(self, what: str, function: Callable[..., object], *args: object) -> Deferred[object]:
        """`what` names it among the troubles; empty where no trouble can be lived
        with.
        """
        self._busy = True
        work: Deferred[object] = self._in_thread(function, *args)

        def over(result: object) -> object:
            self._busy = False
            trouble = result.value if isinstance(result, Failure) else None
            if not what or trouble is None:
                self._engine.disk.troubles.pop(what, None)
                return result
            if not isinstance(trouble, DiskFull) and what != "retention":
                return result
            self._engine.disk.troubles[what] = str(trouble)
            self._pause = TROUBLE_PAUSE
            return None

        return work.addBoth(over).addErrback(self._engine.fail)

    def _find_space(self) -> None:
        """A full disk is no failure: the log says read-only until there is space."""
        if not self._engine.store.try_space() and self._engine.disk.give_up():
            self._engine.store.try_space()

    def _commit(self, frozen: Frozen, durable: int) -> None:
        self._engine.disk.insist(self._tables.commit, frozen, durable=durable)

    def _committed(self) -> None:
        frozen = self._frozen
        if frozen is not None and frozen.committed:
            self._frozen = None
            self._tables.release(frozen)
            self._run("", frozen.clear)

    def _snapshot_due(self) -> int:
        """How much log after the newest snapshot makes another one due: any where that
        lets a segment go.
        """
        return 1 if self._held() else self._settings.snapshot_bytes

    def _held(self) -> bool:
        """Whether a segment is kept for want of snapshots alone."""
        segments = self._engine.store.segments()
        free = 0 if self._retaining is None else self._retaining.free.below
        return len(segments) > 1 and self._older < segments[0].end <= min(
            free, self._tables.position
        )

    def _release(self) -> bool:
        """Take from the log what nobody needs: neither the state, nor a start from the
        older snapshot.
        """
        log = self._engine.store
        if self._retaining is not None and log.durable >= self._retaining.free.as_of:
            self._released += log.release_before(min(self._retaining.free.below, self._older))
        return bool(self._released)

    def _remove(self, archives: bool) -> None:  # threads take arguments by place
        while self._released:
            if archives:
                archive_segment(self._fs, self._released[0], self._archive)
            self._engine.store.remove(self._released[0])
            del self._released[0]

    def _write_snapshot(self) -> None:
        with self._tables.dump() as (position, rows):
            write_snapshot(
                self._fs, str(self._settings.data), self._engine.store.log_id, position, rows
            )
        self._snapshot = position
        self._older = older_snapshot(self._fs, str(self._settings.data))

    def close(self) -> None:
        """Bring everything to disk; blocks. The engine has settled, and nothing of this
        runs in another thread.
        """
        if self._frozen is None:
            machine.save(self._engine.state)
            self._frozen = self._tables.freeze(self._engine.store.end)
        if self._frozen is not None and not self._frozen.committed:
            self._tables.commit(self._frozen, durable=self._engine.store.durable)
            self._tables.release(self._frozen)
        self._tables.close()
