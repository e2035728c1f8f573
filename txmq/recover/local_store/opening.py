"""Opening of a local store: recovery of its log, and of its index from the log.

Damage is reported, and the rest is served: `repair` copies damaged bytes to a file
beside the log, and overwrites them. A message whose body is unreadable is given back:
the broker has a copy of everything.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord, DiskFull, StoreError
from txmq.recover.local_store.directory import open_identity, write_identity
from txmq.recover.local_store.records import ENTRY, LyingRecord, encode_entry, head_of
from txmq.recover.local_store.state import StoreState
from txmq.recover.local_store.values import State, StoreReport
from txmq.store.ballast import Ballast
from txmq.store.log.decoder import Damage
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Appended, Log
from txmq.store.log.record import LOST
from txmq.store.log.repair import repair_locked
from txmq.store.log.segment import list_segments
from txmq.store.tables import IndexDamaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.recover.local_store.index import Index, OpenIndex
    from txmq.recover.local_store.records import Row
    from txmq.recover.local_store.values import Place, StoreIdentity, StoreOwner
    from txmq.store.filesystem import FileLock, FileSystem
    from txmq.store.log.recovery import RecoveryReport
    from txmq.store.log.segment import Segment


class Sizes(NamedTuple):
    """Bytes of a segment of the log, of a step of zeros ahead, and of the ballast.

    The index is written when it is `behind` the log by so many bytes, or has so many
    `rows` in memory.
    """

    segment: int = 32 << 20
    step: int = 2 << 20
    ballast: int = 16 << 20
    behind: int = 32 << 20
    rows: int = 1 << 14


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an open store, and what its opening found."""

    identity: StoreIdentity
    log: Log
    index: Index
    state: StoreState
    ballast: Ballast
    report: StoreReport
    written_at: int  # by the clock of then, as far as it is known


def open_parts(
    fs: FileSystem,
    path: str,
    owner: StoreOwner,
    lock: FileLock,
    open_index: OpenIndex,
    *,
    sizes: Sizes,
    now: Callable[[], int],
) -> Opened:
    """Open the parts of the store in the directory `path`, whose lock is held."""
    identity, reordered = open_identity(fs, path, owner)
    opener = _Opener(fs, path, identity, lock, open_index, sizes, now())
    opened = opener.open("the group keeps its keys' order differently now" if reordered else "")
    if not identity.begun:  # from now on a log that is gone is missed
        write_identity(fs, path, identity._replace(begun=True))
    return opened


def commit_index(index: Index, state: StoreState, position: int) -> None:
    """Write the index as of `position`, up to which the log is on disk."""
    state.save()
    frozen = index.freeze(position)
    assert frozen is not None  # nobody else writes it
    index.commit(frozen, durable=position)
    index.release(frozen)
    frozen.clear()


class _Borrowed:
    """The store's lock in the hands of its log, which is opened more than once."""

    def __init__(self, lock: FileLock) -> None:
        self.require_held = lock.require_held

    def release(self) -> None:
        """Leave it to the store."""


class _Opener:
    """One opening of a store."""

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        identity: StoreIdentity,
        lock: FileLock,
        open_index: OpenIndex,
        sizes: Sizes,
        now: int,
    ) -> None:
        self._fs, self._path, self._identity = fs, path, identity
        self._lock = _Borrowed(lock)
        self._open_index, self._sizes, self._now = open_index, sizes, now
        self._position = 0  # of the index
        self._repaired: list[Damage] | None = None
        self._lies: list[Damage] = []
        self._unnamed: list[Damage] = []
        self._lost: dict[Place, Row] = {}

    def open(self, discard: str) -> Opened:
        self._fs.makedirs(f"{self._path}/log")
        crashpoint("local_store.before_log")
        ballast = Ballast(self._fs, self._path, self._sizes.ballast)
        while True:
            try:
                opened = self._attempt(discard, ballast)
                if ballast.needed:
                    with suppress(DiskFull):  # nothing new is taken until there is space
                        ballast.create()
                return opened
            except IndexDamaged as error:
                if discard:
                    raise
                discard = error.message
            except CorruptRecord as error:
                if self._repaired is not None or not self._first_segment():
                    raise _log_is_gone(error) from error
                self._repaired = repair_locked(self._fs, self._path, durable=self._position)

    def _attempt(self, discard: str, ballast: Ballast) -> Opened:
        index, reason = self._open_index(self._identity.id, discard=discard)
        log = None
        try:
            self._position = index.position
            log, report = self._open_log()
            state = self._state(log, index)
            self._require_present(log, index, state)
            replayed = self._replay(log, index, state)
            returned = self._give_back(log, state)
        except BaseException:
            index.close()
            if log is not None:
                log.close()
            raise
        found = StoreReport(
            self._identity.id,
            self._path,
            report.created,
            replayed,
            "" if report.created else reason,
            report.torn,
            (*(self._repaired or ()), *self._lies),
            tuple(returned),
            tuple(self._unnamed),
            report.created and self._identity.begun,
        )
        written = max(report.stored_at, *(segment.created_at for segment in log.segments()))
        return Opened(self._identity, log, index, state, ballast, found, written)

    def _first_segment(self) -> Segment | None:
        return next(iter(list_segments(self._fs, self._path)), None)

    def _open_log(self) -> tuple[Log, RecoveryReport]:
        segment = self._first_segment()
        start = max(self._position, segment.first if segment else 0)
        log, report = Log.open(
            self._fs,
            self._path,
            now=self._now,
            positions=KnownPositions(scan_from=start, durable=self._position),
            lock=self._lock,
            segment_size=self._sizes.segment,
            preallocate=self._sizes.step,
            new_log_id=lambda: self._identity.id,
        )
        if log.log_id == self._identity.id:
            return log, report
        log.close()
        raise StoreError(
            f"{self._path}: the log is that of store {log.log_id.hex}, identity.json that of"
            f" {self._identity.id.hex}",
            hint="bring both back from one copy",
        )

    def _state(self, log: Log, index: Index) -> StoreState:
        owner = self._identity.owner
        return StoreState(index, log.reader.segment_of, owner.topic_id, ordered=owner.ordered)

    def _require_present(self, log: Log, index: Index, state: StoreState) -> None:
        """Have the index made anew if it stands for segments that are gone."""
        if index.position and min(state.released, index.position) < log.first:
            self._lost = {p: row for p, row in state.rows() if row.position < log.first}
            raise IndexDamaged(f"it is of a log from {state.released} on, not from {log.first}")

    def _replay(self, log: Log, index: Index, state: StoreState) -> int:
        """Bring the index up to the log; return the number of records applied."""
        self._lies, self._unnamed, replayed = [], [], 0
        folder = f"{self._path}/log"
        for record in log.scan(index.position or log.first):
            if record.kind == LOST:
                reason = "unreadable"
                self._unnamed.append(Damage(folder, record.position, record.end, reason))
                continue
            try:
                state.apply(record)
            except LyingRecord as error:
                reason = f"a record that makes no sense: {error}"
                self._lies.append(Damage(folder, record.position, record.end, reason))
            replayed += 1
            if index.overlay_rows >= self._sizes.rows:
                commit_index(index, state, record.end)
        if log.first > state.released:
            reason = "segments are missing"
            self._unnamed.append(Damage(folder, state.released, log.first, reason))
            state.released = log.first
        return replayed

    def _give_back(self, log: Log, state: StoreState) -> list[Place]:
        """Give back what has lost its body, as far as the index knows of it."""
        victims = {}
        if self._unnamed:  # else the segments were not needed any more
            victims = {p: row for p, row in self._lost.items() if state.row(p) is None}
        if spans := self._repaired:
            victims |= {
                place: row
                for place, row in state.rows()
                if any(span.position <= row.position < span.end for span in spans)
            }
        append = partial(log.append, stored_at=self._now, boot_epoch=0)
        for place, row in victims.items():
            store_entry(append, state, place, row, returned=True)
        if flush := log.cut():
            log.write(flush)
            log.complete(flush)
        return [place for place, row in victims.items() if row.state == State.STORED]


def store_entry(
    append: Callable[[int, bytes], Appended],
    state: StoreState,
    place: Place,
    row: Row,
    *,
    returned: bool,
) -> None:
    """Store what is known of a message anew, without its body.

    `returned`: one that is not settled goes back to the broker.
    """
    if returned and row.state == State.STORED:
        row = row._replace(state=State.RETURNED, told=False)
    head = head_of(place, row)
    at = append(ENTRY, encode_entry(head))
    state.store(head, at.position, at.end - at.position, whole=False)


def is_damage(error: StoreError) -> bool:
    """Return whether an error of a read says that the disk lost what was there."""
    return isinstance(error, CorruptRecord) or is_bad_sector(error)


def is_bad_sector(error: StoreError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EIO


def _log_is_gone(error: CorruptRecord) -> CorruptRecord:
    return CorruptRecord(
        error.path,
        error.position,
        error.reason,
        hint="bring the segments of the log back from a copy; or move this directory away, and"
        " adopt the store at the broker, which delivers its own copies",
    )
