"""The broker's data directory: opened at start, maintained while the broker runs.

    <data>/lock  <data>/ballast  <data>/log/*.seg  <data>/snapshot/*.snap
    <data>/index/    LMDB, a cache of the tables

At start the tables come from LMDB, or from the newest snapshot. Every later record of
the log then passes through the same `apply` that made them. While the broker runs,
changes of the tables are written to LMDB now and then, always behind what is durable in
the log.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from uuid import uuid4

import structlog
from twisted.python.failure import Failure

from txmq.core import machine
from txmq.core.events.base import (
    KINDS,
    Event,
    LogRestored,
    RecordContext,
    UnknownEvent,
    decode,
    unsupported_event,
)
from txmq.core.transactions import lost_records
from txmq.core.transactions.timers import NoteSnapshot
from txmq.errors import CorruptRecord, DiskFull, StoreError
from txmq.store.index.environment import has_environment, remove_environment
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.log.archive import archive_segment
from txmq.store.log.cut import cut_log
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log, lock_directory
from txmq.store.log.record import LOST, split_body
from txmq.store.log.segment import HEADER_SIZE, read_log_id, segment_path
from txmq.store.log_copy import CopyNeeded, is_unfinished
from txmq.store.restore import require_served
from txmq.store.shared.rules import Place
from txmq.store.shared.stored_place import drop_place, load_place, save_place
from txmq.store.snapshot import (
    RETAINED,
    newest_snapshot,
    older_snapshot_position,
    read_rows,
    remove_snapshots,
    snapshot_directory,
    snapshot_positions,
    write_snapshot,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from twisted.internet.defer import Deferred

    from txmq.broker.data_directory.log_holds import LogHolds
    from txmq.broker.data_directory.retention_service import RetentionService
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import RunInThread
    from txmq.config.broker import BrokerSettings
    from txmq.core.state.state import State
    from txmq.store.filesystem import FileLock, FileSystem
    from txmq.store.index.lmdb_tables import FrozenOverlays
    from txmq.store.log.record import Record
    from txmq.store.log.recovery import RecoveryReport
    from txmq.store.log.segment import SegmentInfo
    from txmq.store.shared.records import Genesis
    from txmq.store.snapshot import Snapshot

# rows that are not written yet: a dead letter with its traceback takes 2 KiB of memory
CROWDED_ROWS = 30_000
RECORDS_BETWEEN_LOOKS = 64  # at the number of rows, while records are applied at start
RETRY_TICKS = 25  # calls of `tend`: 5 s


class SharedPartition(Protocol):
    """The partition of a shared log, as the start of a node sees it."""

    def genesis(self) -> Genesis:
        """Return how the log begins. Raises CopyNeeded where that was removed."""

    def require_known(self, place: Place) -> None:
        """Raise StoreError where the partition is not the one that was read, CopyNeeded
        where it has forgotten what comes next.
        """


class OpenedDirectory(NamedTuple):
    """A data directory in use, and the report of its recovery."""

    log: Log
    tables: LmdbTables
    state: State
    report: RecoveryReport
    indexed: int  # position that the tables stood for
    replayed: int  # records applied since


def open_directory(
    fs: FileSystem,
    settings: BrokerSettings,
    now: int,
    partition: SharedPartition | None = None,
) -> OpenedDirectory:
    """Open a data directory, or make one. Raises what `Log.open` and `LmdbTables.open`
    raise.

    With `partition` the log is a copy of a shared one. What lies behind the tables is
    cut, once the partition is known to be the one that was read. Raises CopyNeeded
    where the partition does not have what the copy lacks.
    """
    directory = settings.data
    if partition is not None and is_unfinished(fs, str(directory)):
        raise CopyNeeded(f"{directory}: a copy of another node's log has not finished")
    require_served(fs, str(directory))
    lock = lock_directory(fs, str(directory))
    try:
        return open_locked(fs, settings, lock, now, partition)
    except BaseException:
        lock.release()
        raise


def open_locked(
    fs: FileSystem,
    settings: BrokerSettings,
    lock: FileLock,
    now: int,
    partition: SharedPartition | None = None,
) -> OpenedDirectory:
    """Open a data directory whose lock the caller has."""
    directory = settings.data
    with ExitStack() as opened:
        log_id, tables, snapshot = read_log_id(fs, str(directory)), None, None
        known, new_log_id, created_at = KnownPositions(), uuid4(), now
        if log_id is None:
            _require_unused(fs, directory)
        else:
            tables, snapshot = _open_tables(fs, directory, log_id, opened)
            known = KnownPositions(
                tables.position, 0 if snapshot is None else snapshot.position, tables.position
            )
        if partition is not None:
            genesis = _join(fs, directory, tables, log_id, partition)
            if genesis is not None:
                new_log_id, _, _, created_at = genesis
        open_log = partial(
            Log.open,
            fs,
            str(directory),
            now=created_at,
            lock=lock,
            segment_size=settings.segment_bytes,
            preallocate=settings.preallocate_bytes,
            new_log_id=lambda: new_log_id,
        )
        try:
            log, report = open_log(positions=known)
        except CorruptRecord as damage:
            if partition is None or tables is None:
                raise
            if not _go_back(fs, directory, tables, snapshot, partition, damage):
                opened.close()
                _empty(fs, directory)
                return open_locked(fs, settings, lock, now, partition)
            at = tables.position
            log, report = open_log(positions=KnownPositions(at, at, at))
        opened.callback(log.close)
        log.replicated = partition is not None
        if tables is None:
            tables = LmdbTables.open(directory / "index", log_id=log.log_id)
        elif partition is None:
            _require_alone(directory, tables, log)
        state, indexed = machine.load(tables), tables.position
        replayed = _catch_up(state, log, tables)
        opened.pop_all()
    return OpenedDirectory(log, tables, state, report, indexed, replayed)


def _open_tables(
    fs: FileSystem, directory: Path, log_id: UUID, opened: ExitStack
) -> tuple[LmdbTables, Snapshot | None]:
    """Return the tables of a log as of the newest state that was stored, and the newest
    snapshot.
    """
    tables = LmdbTables.open(directory / "index", log_id=log_id)
    opened.callback(tables.close)
    snapshot = newest_snapshot(fs, str(directory), log_id)
    if snapshot is not None and tables.position < snapshot.position:
        tables.load(snapshot.position, read_rows(fs, snapshot))
    return tables, snapshot


def _join(
    fs: FileSystem,
    directory: Path,
    tables: LmdbTables | None,
    log_id: UUID | None,
    partition: SharedPartition,
) -> Genesis | None:
    """Cut what lies behind the tables of a copy, if it is one of this partition. Return
    how the log begins, for a copy that begins there.
    """
    place, genesis = None if tables is None else load_place(tables), None
    if place is None or place.log_id is None:
        genesis = partition.genesis()
        if tables is not None:
            may_be_cut = place is not None or not tables.position
            _require_copy(directory, is_copy=may_be_cut and log_id == genesis.log_id)
        if genesis.start != HEADER_SIZE:
            raise CopyNeeded("the log begins with what was restored from a backup")
    else:
        partition.require_known(place)
    if tables is not None:
        cut_log(fs, str(directory), max(tables.position, HEADER_SIZE))
    return genesis


def _go_back(
    fs: FileSystem,
    directory: Path,
    tables: LmdbTables,
    snapshot: Snapshot | None,
    partition: SharedPartition,
    damage: CorruptRecord,
) -> bool:
    """Have the damaged copy of a shared log end at its newest snapshot: the partition
    has the rest. Return False where the copy has to begin anew. Raises CopyNeeded where
    the partition does not have all of it.
    """
    place = None
    if snapshot is not None and snapshot.position < tables.position:
        tables.load(snapshot.position, read_rows(fs, snapshot))
        place = load_place(tables)
    if place is None:
        try:
            has_all = partition.genesis().start == HEADER_SIZE
        except CopyNeeded:
            has_all = False
        if not has_all:
            raise CopyNeeded(str(damage), keep=tables.position) from damage
        structlog.get_logger().error("recover.reads_again", position=0, reason=str(damage))
        return False
    partition.require_known(place)
    cut_log(fs, str(directory), tables.position)
    structlog.get_logger().error(
        "recover.reads_again", position=tables.position, reason=str(damage)
    )
    return True


def _empty(fs: FileSystem, directory: Path) -> None:
    """Remove a copy and what was made from it. It may be interrupted."""
    remove_environment(directory / "index")
    remove_snapshots(fs, str(directory))
    cut_log(fs, str(directory), 0)


def _require_unused(fs: FileSystem, directory: Path) -> None:
    """Raise CorruptRecord where a directory without a log has what is made from one.

    The log's disk may not be mounted. A broker that began a new log would serve none of
    its messages, and would remove index and snapshots.
    """
    made = [directory / "index"] if has_environment(directory / "index") else []
    if snapshot_positions(fs, str(directory)):
        made.append(Path(snapshot_directory(str(directory))))
    if made:
        reason = f"the log is missing, from which {made[0]} was made"
        hint = "mount its disk, or restore a backup; a new log begins in an empty directory"
        raise CorruptRecord(segment_path(str(directory), 0), 0, reason, hint=hint)


def _require_alone(directory: Path, tables: LmdbTables, log: Log) -> None:
    """Raise StoreError for the copy of a shared log, which is the other nodes' too. One
    that was restored since is another incarnation, and a broker's alone.
    """
    if load_place(tables) is None:
        return
    records = log.scan(max(tables.position, log.first))
    if any(record.kind == KINDS[LogRestored] for record in records):
        drop_place(tables)
    else:
        raise StoreError(
            f"{directory} is a copy of a cluster's log",
            hint="start it with its section [cluster]; let the leading node make changes",
        )


def _require_copy(directory: Path, *, is_copy: bool) -> None:
    """Raise StoreError for the log of a broker alone, which a cut would destroy."""
    if not is_copy:
        raise StoreError(
            f"{directory} has a log that is not the cluster's",
            hint="give a node of a cluster an empty data directory, or a copy of another node's",
        )


def _catch_up(state: State, log: Log, tables: LmdbTables) -> int:
    """Apply the records that the tables do not have. Return their number.

    Whenever many rows wait in memory they are written: there may be a snapshot and no
    index, and millions of rows since.
    """
    count = 0
    for count, position in enumerate(_applied(state, log, tables.position), 1):
        if count % RECORDS_BETWEEN_LOOKS == 0 and tables.overlay_rows >= CROWDED_ROWS:
            machine.save(state)
            write_tables(tables, position, durable=log.durable)
    return count


def write_tables(tables: LmdbTables, position: int, *, durable: int) -> None:
    """Write what waits in memory, as of a position of the log; blocks."""
    frozen = tables.freeze(position)
    assert frozen is not None, "nothing is under way"
    tables.commit(frozen, durable=durable)
    tables.release(frozen)


class RecordSource(Protocol):
    """The records of a log: an open one, or files."""

    @property
    def first(self) -> int: ...
    def scan(self, start: int) -> Iterator[Record]: ...


def roll_forward(state: State, log: RecordSource, position: int, end: int | None = None) -> int:
    """Apply the log's records from `position` up to `end`. Return their number."""
    return sum(1 for _applied_to in _applied(state, log, position, end))


def _applied(
    state: State, log: RecordSource, position: int, end: int | None = None
) -> Iterator[int]:
    """Apply the records one by one, and yield the end of each."""
    for record in log.scan(max(position, log.first)):
        if end is not None and record.position >= end:
            break
        if record.kind == LOST:
            lost_records.apply_lost(state, record.end)
        else:
            body = split_body(record)
            place = RecordContext(
                record.position,
                record.end,
                body.attachment_position,
                record.stored_at,
                record.boot_epoch,
            )
            try:
                _apply(state, decode(record.kind, body.head), place)
            except UnknownEvent as unknown:
                raise unsupported_event(record.position, unknown.kind) from None
        yield record.end


def _apply(state: State, event: Event, place: RecordContext) -> None:
    if not state.lost_log_end:
        machine.apply(state, event, place)
    elif not machine.apply_after_loss(state, event, place):
        structlog.get_logger().error(
            "recover.left_out", event=type(event).__name__, position=place.position
        )


class StorageService:
    """Writes tables behind the log, makes snapshots, removes segments that are not
    needed, and looks for space where the log found none.

    A timer calls `tick`. Everything that blocks runs in one thread, one piece of work
    at a time. A full disk, or an archive that takes nothing, is no failure: it is
    reported in `Disk.troubles` and retried. Where the broker itself needs space to go
    on, it releases the ballast.
    """

    def __init__(
        self,
        fs: FileSystem,
        engine: Engine,
        tables: LmdbTables,
        settings: BrokerSettings,
        in_thread: RunInThread,
    ) -> None:
        self._fs, self._engine, self._tables, self._settings = fs, engine, tables, settings
        self._in_thread = in_thread
        self._frozen: FrozenOverlays | None = None
        self._busy = False
        self._snapshot = tables.position
        self._older = older_snapshot_position(fs, str(settings.data))
        self._released: list[SegmentInfo] = []  # by the log, and not removed yet
        self._retention: RetentionService | None = None
        self._holds: LogHolds | None = None
        self._archive = ""
        self._pause = 0  # calls of `tend` to let pass after trouble
        # of a shared log: where its partition is read, or None
        self.place: Callable[[], Place] | None = None
        # of its leader: lets the partition forget what is before a place
        self.forget_before: Callable[[Place], None] | None = None
        self._places: deque[tuple[int, Place]] = deque()  # of snapshots, by their positions
        self._tried_space = False  # in the tick before

    def remove_segments(
        self, retention: RetentionService, archive: str, holds: LogHolds | None = None
    ) -> None:
        """Remove segments from now on, as the retention service allows; or move them to
        the folder `archive`. Backups hold those that they have not read yet.
        """
        self._retention, self._archive, self._holds = retention, archive, holds

    def tick(self) -> None:
        """Timer: start what is due, if nothing is under way."""
        log = self._engine.store
        if self._busy or self._engine.failed is not None:
            return
        self._tried_space = log.read_only and not self._tried_space
        if self._tried_space:  # on a full disk in turns with work that frees space
            self._run("", self._find_space)
        elif self._pause:
            self._pause -= 1
        elif self._frozen is not None:
            if log.durable >= self._frozen.position:
                work = self._run("index", self._commit, self._frozen, log.durable)
                work.addCallback(lambda _: self._committed())
        else:
            self._maintain()

    def has_room(self) -> bool:
        """Return True while few rows wait to be written. Otherwise start to write them,
        before the timer does.
        """
        if self._tables.overlay_rows < CROWDED_ROWS:
            return True
        if not self._pause:
            self.tick()
        return False

    def _maintain(self) -> None:
        log, disk = self._engine.store, self._engine.disk
        if self._tables.position - self._snapshot >= self._snapshot_due():
            place = None if self.place is None else load_place(self._tables)
            if place is not None:
                self._places.append((self._tables.position, place))
            self._run("snapshot", disk.write_with_ballast, self._write_snapshot)
        elif self._release():
            archives = self._retention is not None and self._retention.archiving
            self._run("retention", self._remove, archives).addCallback(lambda _: self._forget())
        elif log.end == self._snapshot and self._awaits_snapshot() and not self._follows:
            self._engine.submit(NoteSnapshot(self._snapshot))
        elif (
            disk.ballast_fits
            and disk.ballast is not None
            and disk.ballast.needed
            and log.end > self._settings.segment_bytes
        ):
            self._run("ballast", disk.ballast.create)
        elif log.end > self._tables.position:
            self._freeze()

    def _freeze(self) -> None:
        """Set apart what the tables get next."""
        machine.save(self._engine.state)
        if self.place is not None:
            save_place(self._tables, self.place())
        self._frozen = self._tables.freeze(self._engine.store.end)

    @property
    def busy(self) -> bool:
        """Return whether the thread is at work."""
        return self._busy

    def _run(self, what: str, function: Callable[..., object], *args: object) -> Deferred[object]:
        """Run a function in the thread. `what` names its errors in `Disk.troubles`;
        empty = no error is tolerable.
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
            self._pause = RETRY_TICKS
            return None

        return work.addBoth(over).addErrback(self._engine.fail)

    def _find_space(self) -> None:
        """Look whether there is space again. Until then the log is read-only."""
        if not self._engine.store.try_space() and self._engine.disk.release_ballast():
            self._engine.store.try_space()

    def _commit(self, frozen: FrozenOverlays, durable: int) -> None:
        if self.place is not None:  # else the tables might lead the log on this disk
            self._engine.store.sync()
        self._engine.disk.write_with_ballast(self._tables.commit, frozen, durable=durable)

    def _committed(self) -> None:
        frozen = self._frozen
        if frozen is not None and frozen.committed:
            self._frozen = None
            self._tables.release(frozen)
            self._run("", frozen.clear)

    def _snapshot_due(self) -> int:
        """Return the bytes of log after which another snapshot is due: one byte, if it
        would allow the removal of a segment.
        """
        return 1 if self._awaits_snapshot() else self._settings.snapshot_bytes

    def _awaits_snapshot(self) -> bool:
        """Return whether a segment is kept only because a newer snapshot is missing."""
        segments = self._engine.store.segments()
        free = 0 if self._retention is None else self._retention.free.below
        return len(segments) > 1 and self._older < segments[0].end <= min(
            free, self._tables.position
        )

    def _release(self) -> bool:
        """Release segments that neither the state needs, nor a start from the older
        snapshot.
        """
        log = self._engine.store
        if self._retention is not None and log.durable >= self._retention.free.as_of:
            below = min(self._retention.free.below, self._older, self._held_from())
            self._released += log.release_before(below)
        return bool(self._released)

    @property
    def _follows(self) -> bool:
        return self._retention is not None and not self._retention.decides

    def _forget(self) -> None:
        """Let the partition of a shared log forget what is removed here, and no copy
        would read again: each has two snapshots that are this near to its end.
        """
        if self.forget_before is None:
            return
        log, place = self._engine.store, None
        below = min(log.first, log.end - RETAINED * self._settings.snapshot_bytes)
        while self._places and self._places[0][0] <= below:
            place = self._places.popleft()[1]
        if place is not None:
            self.forget_before(place)

    def _held_from(self) -> int:
        """Return the position from which backups hold the log, unless the disk is
        full.
        """
        if self._holds is None or self._engine.disk.refusing:
            return self._engine.store.end
        return self._holds.lowest()

    def _remove(self, archives: bool) -> None:  # noqa: FBT001  # threads take arguments by place
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
        self._older = older_snapshot_position(self._fs, str(self._settings.data))

    def close(self) -> None:
        """Bring everything to disk, blocking. The engine has drained, and the thread is
        idle.
        """
        if self._frozen is None:
            self._freeze()
        if self._frozen is not None and not self._frozen.committed:
            self._commit(self._frozen, self._engine.store.durable)
            self._tables.release(self._frozen)
        self._tables.close()
