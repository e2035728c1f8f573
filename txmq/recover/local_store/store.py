"""The consumer's local store: messages of a group and topic that wait on local disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from threading import Condition, Lock
from typing import TYPE_CHECKING, Self

from txmq.crashpoints import crashpoint
from txmq.errors import (
    DirectoryInUse,
    DiskFull,
    StoreClosed,
    StoreError,
    StoreFull,
)
from txmq.recover.local_store.compaction import Compaction
from txmq.recover.local_store.directory import prepare
from txmq.recover.local_store.export import write_quarantine
from txmq.recover.local_store.group_commit import GroupCommit
from txmq.recover.local_store.index import LmdbIndex
from txmq.recover.local_store.opening import Sizes, is_damage, open_parts, store_entry
from txmq.recover.local_store.records import (
    CHANGED,
    FORGOTTEN,
    STORED,
    TOLD,
    LyingRecord,
    StoredHead,
    change_fields,
    check_head,
    decode_message,
    encode_changes,
    encode_places,
    encode_stored,
    encode_told,
    failure_fields,
    told_fields,
)
from txmq.recover.local_store.state import entry_of
from txmq.recover.local_store.values import (
    Change,
    Entry,
    Place,
    Scanned,
    State,
    StoredMessage,
    StoreLimits,
    StoreOwner,
    StoreReport,
    StoreStats,
)
from txmq.store.ballast import Ballast
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.log import lock_directory
from txmq.store.tables import IndexDamaged

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.model.retry import FailureReport
    from txmq.recover.local_store.index import OpenIndex
    from txmq.recover.local_store.opening import Opened
    from txmq.recover.local_store.records import Row
    from txmq.store.filesystem import FileLock, FileSystem
    from txmq.store.index.lmdb_tables import FrozenOverlays
    from txmq.store.log.segment import SegmentInfo

ToStore = tuple[StoredMessage, int, "FailureReport"]  # with due time and failure

PENDING = 4 << 20  # bytes in memory, until whoever puts more waits for the disk
LAZY_BYTES = 256 << 10  # of what need not be on disk at once
OVERHEAD = 256  # bytes of a record beside body and key, about
AT_ONCE = 1_000  # outcomes in a record
_LOCK_TRIES, _LOCK_PAUSE = 3, 0.02  # a list of stores looks at locks, for a moment
SIZES = Sizes()
DEFAULT_LIMITS = StoreLimits()


class LocalStore:
    """The store of one consumer group and topic on this machine.

    Any thread may call any method. They block; `put` and `record` return when the
    store's log is on disk, and several threads share a sync. What `due` and `untold`
    return is on disk, too. After a failure of the disk every method raises StoreClosed.
    """

    def __init__(
        self,
        fs: FileSystem,
        opened: Opened,
        limits: StoreLimits,
        lock: FileLock,
        open_index: OpenIndex,
        *,
        sizes: Sizes,
        now: Callable[[], int],
    ) -> None:
        self.identity = opened.identity
        self.id: UUID = opened.identity.id
        self.owner = opened.identity.owner
        self.path = opened.report.path
        self.limits = limits
        self._log, self._index, self._state = opened.log, opened.index, opened.state
        self._fs = fs
        self._file_lock, self._open_index, self._now = lock, open_index, now
        self._changed = Condition(Lock())
        self._commit = GroupCommit(fs, self.path, self._log, opened.ballast, self._changed, now)
        self._compaction = Compaction(self._commit, self._state, sizes.segment, self._give_back)
        self._sizes = sizes
        self._handed: set[Place] = set()
        self._readers = 0
        self._maintaining = False
        self._frozen: FrozenOverlays | None = None  # to be written to the index
        self._doomed: list[SegmentInfo] = []  # released, and to be removed
        self._damaged = len(opened.report.returned)
        self._written_at = opened.written_at
        self._closed = self._index_is_damaged = self._is_the_parents = False

    @classmethod
    def open(
        cls,
        directory: str,
        owner: StoreOwner,
        limits: StoreLimits = DEFAULT_LIMITS,
        *,
        now: Callable[[], int],
    ) -> tuple[Self, StoreReport]:
        """Open the owner's store below `directory`, or make it.

        `now` returns microseconds since the epoch. Raises DirectoryInUse where another
        process has it, ForeignStore for that of another owner, UnsupportedFormat for
        one of a newer version, StoreError for a place that cannot be used.
        """
        path = prepare(str(directory), owner)
        return cls.open_at(
            RealFileSystem(), path, owner, limits, LmdbIndex(path), sizes=SIZES, now=now
        )

    @classmethod
    def open_at(
        cls,
        fs: FileSystem,
        path: str,
        owner: StoreOwner,
        limits: StoreLimits,
        open_index: OpenIndex,
        *,
        sizes: Sizes,
        now: Callable[[], int],
    ) -> tuple[Self, StoreReport]:
        """Open the store in the directory `path`, which may be a simulated one.

        On a full disk the ballast makes room.
        """
        try:
            return cls._open_at(fs, path, owner, limits, open_index, sizes=sizes, now=now)
        except DiskFull:
            if not Ballast(fs, path, sizes.ballast).release():
                raise
            return cls._open_at(fs, path, owner, limits, open_index, sizes=sizes, now=now)

    @classmethod
    def _open_at(
        cls,
        fs: FileSystem,
        path: str,
        owner: StoreOwner,
        limits: StoreLimits,
        open_index: OpenIndex,
        *,
        sizes: Sizes,
        now: Callable[[], int],
    ) -> tuple[Self, StoreReport]:
        lock = _lock(fs, path)
        try:
            opened = open_parts(fs, path, owner, lock, open_index, sizes=sizes, now=now)
        except BaseException:
            lock.release()
            raise
        store = cls(fs, opened, limits, lock, open_index, sizes=sizes, now=now)
        return store, opened.report

    def put(self, messages: Sequence[ToStore]) -> None:
        """Store messages that are not there yet; they are on disk at return.

        Messages of a key go in their order. Raises StoreFull or DiskFull before
        anything is stored.
        """
        with self._locked():
            self._begin_change()
            self._commit.require_space()
            new = self._new(messages)
            self._require_room(new)
            for message, due, failure in new:
                self._store(message, due, failure)
                if self._log.end - self._log.durable > PENDING:
                    self._commit.settle(self._log.end)
            self._commit.settle(self._log.end)
        self._maintain()

    def record(self, changes: Sequence[Change]) -> None:
        """Record outcomes; they are on disk at return.

        Outcomes of messages that are not there, or settled, change nothing. A change
        without a failure keeps the failure before it. DiskFull means that not even an
        outcome has space: it is kept in memory, and written with the next one.
        """
        fields = change_fields(changes)
        with self._locked():
            self._begin_change()
            for start in range(0, len(fields), AT_ONCE):
                some = fields[start : start + AT_ONCE]
                self._commit.append(CHANGED, encode_changes(some))
                self._state.change(some)
            self._handed.difference_update(change[0] for change in fields)
            self._commit.settle(self._log.end)
        self._maintain()

    def forget(self, places: Iterable[Place]) -> None:
        """Drop messages that are settled, or that the broker has.

        On disk soon; until then a restart may bring them back.
        """
        with self._locked():
            self._begin_change()
            self._forget([place for place in places if self._state.row(place) is not None])
            self._settle_lazily()
        self._maintain()

    def quarantine(self, places: Iterable[Place], reason: str) -> str:
        """Move messages out of the store, durably, into a file that is an export.

        Returns its path, empty where none of the messages is there.
        """
        with self._locked():
            self._settle_visible()
            scanned = [one for place in places if (one := self._scanned(place)) is not None]
            if not scanned:
                return ""
            path = write_quarantine(self._fs, self.path, self.identity, scanned, reason)
            self._forget([one.entry.place for one in scanned])
            self._commit.settle(self._log.end)
        self._maintain()
        return path

    def told(self, entries: Sequence[Entry]) -> None:
        """Mark entries of `untold` as known to the broker, unless they have changed
        since.

        On disk soon; until then a restart may have them told again.
        """
        with self._locked():
            self._begin_change()
            fields = [told for told in told_fields(entries) if self._state.is_news(*told)]
            for start in range(0, len(fields), AT_ONCE):
                some = fields[start : start + AT_ONCE]
                self._commit.append(TOLD, encode_told(some))
                self._state.tell(some)
            self._settle_lazily()
        self._maintain()

    def due(self, now: int, most: int) -> list[StoredMessage]:
        """Hand out messages whose time has come, at most `most`: of each key that is
        kept in order only the first.

        A message is handed out once, until `record` or `release`.
        """
        messages: list[StoredMessage] = []
        with self._locked():
            while len(messages) < most:
                self._settle_visible()
                places = self._places_due(now, most - len(messages))
                if not places:
                    break
                for place in places:
                    message = self._read(place)
                    if message is not None:
                        self._handed.add(place)
                        messages.append(message)
        return messages

    def release(self, place: Place) -> None:
        """Take back a message that was handed out, unchanged."""
        with self._changed:
            self._handed.discard(place)
            self._changed.notify_all()

    def bound_waits(self, longest: int, farthest: int) -> int:
        """Let no message wait for longer than `longest`, where the clock is behind what
        it was when something was written here; otherwise for no longer than `farthest`.

        Return the number of messages whose wait was cut.
        """
        now, bounded = self._now(), 0
        while True:
            with self._locked():
                self._settle_visible()
                was_ahead = max(self._written_at, now) > now or self._state.came_after(now)
                latest = now + (longest if was_ahead else max(longest, farthest))
                rows = [
                    (place, self._state.row(place))
                    for place in islice(self._state.due_after(latest), AT_ONCE)
                ]
            changes = [
                Change(place, State.STORED, row.attempt, latest) for place, row in rows if row
            ]
            if not changes:
                return bounded
            self.record(changes)
            bounded += len(changes)

    def next_due(self) -> int | None:
        """Return when the next message is due, of those that are not handed out."""
        with self._locked():
            self._commit.require_open()
            for due, place in self._state.due((1 << 63) - 1):
                if place not in self._handed:
                    return due
        return None

    def holds_key(self, key: str | None) -> bool:
        """Return whether a later message of the key must follow those that are here."""
        with self._locked():
            self._commit.require_open()
            return key is not None and self._state.holds_key(key)

    def untold(self, most: int) -> list[Entry]:
        """Return what the broker does not know, each key in its order."""
        entries = []
        with self._locked():
            self._settle_visible()
            for place in self._state.untold():
                row = self._state.row(place)
                if row is not None:
                    entries.append(entry_of(place, row))
                if len(entries) >= most:
                    break
        return entries

    def entries(self, after: Place | None, most: int) -> list[Entry]:
        """Return what is known of all messages, by place: a page of those after one."""
        with self._locked():
            self._settle_visible()
            rows = islice(self._state.rows(after), most)
            return [entry_of(place, row) for place, row in rows]

    def entry(self, place: Place) -> Entry | None:
        """Return what is known of a message."""
        with self._locked():
            self._commit.require_open()
            return self._state.entry(place)

    def stats(self) -> StoreStats:
        """Return figures; also of a closed store."""
        with self._locked():
            state, disk_full = self._state, self._commit.disk_full
            limited = state.messages >= self.limits.messages or state.bytes >= self.limits.bytes
            return StoreStats(
                state.messages,
                state.bytes,
                0 if self._closed else state.oldest(),
                state.attempts,
                limited or disk_full,
                state.settled,
                self._log.end - self._log.first,
                disk_full,
                self._damaged,
            )

    def settle(self) -> None:
        """Bring to disk what may wait: what the broker knows, and what was dropped.

        A full disk leaves it for later.
        """
        with self._locked(), suppress(DiskFull):
            self._commit.require_open()
            if not self._commit.disk_full:
                self._commit.settle(self._log.end)

    def close(self) -> None:
        """Close the store; other calls then raise StoreClosed. Idempotent."""
        if self._is_the_parents:
            return
        with self._changed:
            while self._maintaining:
                self._changed.wait()
            self._commit.wait_for_writer()
            if self._closed:
                return
            sound = self._commit.is_open
            try:
                if sound:
                    with suppress(DiskFull):  # what is acknowledged is on disk
                        self._commit.settle(self._log.end)
            finally:
                self._commit.fail("is closed")
                self._closed = True
                self._close_files(sound=sound and self._log.durable == self._log.end)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. A damaged index closes the store."""
        if self._is_the_parents:  # where a thread that is not here may hold the lock
            raise StoreClosed(
                f"{self.path}: the store belongs to the process that opened it, and this one was"
                " forked from it",
                hint="make a consumer in this process",
            )
        with self._changed:
            try:
                yield
            except IndexDamaged as error:
                self._index_is_damaged = True
                self._commit.fail(f"failed: {error.message}")
                raise StoreClosed(
                    f"{self.path}: {error.message}",
                    hint="close the store and open it again: the index is made anew from the log",
                ) from error

    def leave_to_parent(self) -> None:
        """Let go of the lock in the child of a fork, so that it ends with the parent,
        whose store this is.
        """
        self._is_the_parents = True
        self._file_lock.release()

    def _close_files(self, *, sound: bool) -> None:
        with ExitStack() as closing:  # whatever fails, the rest is closed, the lock last
            closing.callback(self._file_lock.release)
            closing.callback(self._log.close)
            if sound:
                closing.callback(self._open_index.seal)
            elif self._index_is_damaged:
                closing.callback(self._open_index.discard)
            closing.callback(self._index.close)
            if sound:
                with suppress(StoreError):  # the log has it
                    self._freeze_index()
                    self._write_index()

    def _begin_change(self) -> None:
        """Wait for readers, so that they come to an end; require an open store."""
        while self._readers:
            self._changed.wait()
        self._commit.require_open()

    def _settle_visible(self) -> None:
        """Return once all that can be seen is on disk.

        Changes wait until then.
        """
        self._readers += 1
        try:
            self._commit.require_open()
            self._commit.settle(self._commit.visible)
        finally:
            self._readers -= 1
            if not self._readers:
                self._changed.notify_all()

    def _settle_lazily(self) -> None:
        if self._log.end - self._log.durable > LAZY_BYTES:
            self._commit.settle(self._log.end)

    def _forget(self, places: list[Place]) -> None:
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE]
            self._commit.append(FORGOTTEN, encode_places(some))
            self._state.forget(some)
        self._handed.difference_update(places)

    def _scanned(self, place: Place) -> Scanned | None:
        row = self._state.row(place)
        if row is None:
            return None
        message = self._message(place, row) if row.whole else None
        return Scanned(entry_of(place, row), message)

    def _new(self, messages: Sequence[ToStore]) -> list[ToStore]:
        """Return the messages that the store has not."""
        new = {}
        for stored in messages:
            place = stored[0].place
            if place.topic_id != self.owner.topic_id:
                raise ValueError(f"{place} is not of topic {self.owner.topic_id}")
            if place not in new and self._state.row(place) is None:
                new[place] = stored
        return list(new.values())

    def _require_room(self, new: list[ToStore]) -> None:
        state, limits = self._state, self.limits
        size = sum(len(message.body) + OVERHEAD for message, _, _ in new)
        if new and (
            state.messages + len(new) > limits.messages or state.bytes + size > limits.bytes
        ):
            raise StoreFull(
                f"{self.path}: {state.messages} messages of {state.bytes} bytes are stored, the"
                f" limits are {limits.messages} and {limits.bytes}: no room for {len(new)} of"
                f" {size} more"
            )

    def _store(self, message: StoredMessage, due: int, failure: FailureReport) -> None:
        place = message.place
        chain = self._state.chain_of(message.key)
        head = StoredHead(
            *place,
            message.key,
            self._state.next_run(place, chain),
            int(State.STORED),
            message.attempt,
            due,
            self._now(),
            False,
            failure_fields(failure),
            message.generation,
            message.epoch,
            message.tag,
            tuple(message.headers.items()),
            message.message_id,
            message.born_at,
            message.stored_at,
        )
        check_head(head)
        at = self._commit.append(STORED, encode_stored(head), message.body)
        self._state.store(head, at.position, at.end - at.position, whole=True, new=True)

    def _places_due(self, now: int, most: int) -> list[Place]:
        places: list[Place] = []
        for _, place in self._state.due(now):
            if place not in self._handed:
                places.append(place)
                if len(places) == most:
                    break
        return places

    def _read(self, place: Place) -> StoredMessage | None:
        """Return a stored message; None, and give it back, if it is unreadable."""
        row = self._state.row(place)
        assert row is not None
        message = self._message(place, row)
        if message is None:
            self._give_back([place])
        return message

    def _message(self, place: Place, row: Row) -> StoredMessage | None:
        message = None
        try:
            if row.position >= self._log.first:
                message = decode_message(self._log.record_at(row.position))
        except LyingRecord:
            pass
        except StoreError as error:
            if not is_damage(error):
                raise
        if message is None or message.place != place:
            return None
        return message._replace(attempt=row.attempt)

    def _give_back(self, places: list[Place]) -> None:
        """Have the broker deliver its copies of messages that are unreadable here."""
        for place in places:
            row: Row | None = self._state.row(place)
            if row is not None:
                self._commit.require_open()
                store_entry(self._commit.append, self._state, place, row, returned=True)
                self._damaged += 1

    def _maintain(self) -> None:
        """Write the index, and make the log smaller, where it is time.

        What the caller did is done. A full disk leaves this for later; what else goes
        wrong closes the store.
        """
        with self._locked():
            if self._maintaining or self._commit.failure or not self._needs_maintenance():
                return
            self._maintaining = True
            try:
                self._maintain_now()
            except DiskFull:
                pass
            except IndexDamaged:
                raise
            except StoreError as error:
                self._commit.fail(f"failed: {error.message}")
            finally:
                self._maintaining = False
                self._changed.notify_all()

    def _needs_maintenance(self) -> bool:
        return self._index_is_behind or self._compaction.is_due

    @property
    def _index_is_behind(self) -> bool:
        return (
            self._index.overlay_rows >= self._sizes.rows
            or self._log.end - self._index.position >= self._sizes.behind
        )

    def _maintain_now(self) -> None:
        if self._compaction.is_due:
            self._compaction.relocate()
        if self._index_is_behind:
            self._freeze_index()
            self._commit.settle(self._log.end)
            self._write_index(blocking=self._changed)
        self._doomed += self._compaction.removable(self._index.position)
        if self._doomed:
            self._changed.release()
            try:
                crashpoint("local_store.before_removal")
                while self._doomed:  # in order: what fails is tried again before the next
                    self._log.remove(self._doomed[0])
                    del self._doomed[0]
                crashpoint("local_store.after_removal")
            finally:
                self._changed.acquire()

    def _freeze_index(self) -> None:
        if self._frozen is None:
            self._state.save()
            self._frozen = self._index.freeze(self._log.end)

    def _write_index(self, blocking: Condition | None = None) -> None:
        """Write what is frozen, without the lock `blocking`."""
        frozen = self._frozen
        assert frozen is not None
        durable = self._log.durable
        if blocking:
            blocking.release()
        try:
            crashpoint("local_store.before_index_commit")
            self._index.commit(frozen, durable=durable)
            crashpoint("local_store.after_index_commit")
        finally:
            if blocking:
                blocking.acquire()
        self._index.release(frozen)
        self._frozen = None
        frozen.clear()


def _lock(fs: FileSystem, path: str) -> FileLock:
    for _ in range(_LOCK_TRIES - 1):
        with suppress(DirectoryInUse):
            return lock_directory(fs, path)
        time.sleep(_LOCK_PAUSE)
    return lock_directory(fs, path)
