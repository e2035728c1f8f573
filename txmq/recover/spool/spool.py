"""One spool: a log of batches, the notes about them, and those that were refused.

    stage ──► flush ──► read ──► mark_drained ──► release

`stage` costs memory only; `flush` brings everything staged to disk with one fdatasync.
For one thread; `oldest_at` and the counters may be read by any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple, Self
from uuid import UUID

from txmq.batch import with_producer
from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord, DiskFull, StoreError
from txmq.recover.spool.files import remove_tree
from txmq.recover.spool.identity import NAME, Identity, read_identity, write_identity
from txmq.recover.spool.records import (
    BATCH,
    NOTE,
    Note,
    NoteKind,
    Renewals,
    SpooledBatch,
    decode_record,
    encode_batch,
    encode_note,
    retried_session,
)
from txmq.recover.spool.refused import (
    FOLDER,
    Refusal,
    name_of,
    read_refused,
    refused_names,
    remove_refused,
    write_refused,
)
from txmq.store.filesystem import FileLock, FileSystem
from txmq.store.log.decoder import Damage
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log, lock_directory
from txmq.store.log.recovery import TornTail
from txmq.store.log.repair import repair
from txmq.store.log.segment import list_segments, log_directory, position_of_segment
from txmq.store.log.writer import Flush

SEGMENT_SIZE = 64 << 20
PREALLOCATE = 8 << 20
_BOOT_EPOCH = 1
LOCK = "lock"
_RECORD_OVERHEAD = 128  # bytes of a record beside its batch, at most for usual names
_SPARE = 1 << 20  # bytes that stay free on the disk, for notes


class SpoolReport(NamedTuple):
    """Findings of an opening: a torn tail that was cut, damage that was put aside.

    The former bytes stay beside the log, in `*.torn-*` and `*.lost-*`.
    """

    torn: TornTail | None = None
    lost: tuple[Damage, ...] = ()


class ToSend(NamedTuple):
    """The batches to send for one record: its batch, or its rows if it was split.

    Refused ones are left out. `end` is the position after the record.
    """

    batches: list[SpooledBatch]
    end: int


class Spool:
    """An open spool, which this process owns.

    `waiting` counts messages, `size` the bytes that they occupy. Every call may raise
    DiskFull: nothing is changed then, except by `flush`, which may be called again. Any
    other StoreError is final.
    """

    def __init__(
        self, fs: FileSystem, path: str, log: Log, lock: FileLock, identity: Identity
    ) -> None:
        self._fs, self._log, self._lock = fs, log, lock
        self.path, self.identity = path, identity
        self.renewals = Renewals()
        self._splits: set[int] = set()
        self._refused = refused_names(fs, path)
        self._unwritten: Flush | None = None
        self._closed = False
        self.drained = log.segments()[0].first
        self.waiting = 0
        self._load()
        self.found_to = log.end  # the records before are those of earlier processes

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        path: str,
        new: Identity | None,
        *,
        now: int,
        segment_size: int = SEGMENT_SIZE,
        preallocate: int = PREALLOCATE,
    ) -> tuple[Self, SpoolReport]:
        """Make a spool with the identity `new` in a directory; without it, open the one
        that is there.

        Raises DirectoryInUse where another process owns it, UnsupportedFormat where a
        newer txmq made it, and StoreError for anything else that is there.
        """
        if new is not None:
            fs.makedirs(path)
        lost: tuple[Damage, ...] = ()
        # Before the identity: others leave alone what has none.
        lock = fs.lock(f"{path}/{LOCK}")
        try:
            identity = identity_of(fs, path, new)
            fs.makedirs(log_directory(path))
            try:
                log, torn = _open_log(fs, path, lock, now, segment_size, preallocate)
            except CorruptRecord:
                lock.release()
                lost = tuple(repair(fs, path))
                lock = lock_directory(fs, path)
                log, torn = _open_log(fs, path, lock, now, segment_size, preallocate)
            spool = cls(fs, path, log, lock, identity)
        except BaseException:
            lock.release()
            raise
        return spool, SpoolReport(torn, lost)

    def _load(self) -> None:
        """Read the notes, and count what waits."""
        for record in self._log.scan(self._log.first):
            if record.kind == NOTE:
                note = decode_record(record)
                assert isinstance(note, Note), "the kind of a note"
                self._apply(note)
        self.waiting = sum(
            batch.count for some in self.read(self.drained) for batch in some.batches
        )

    def _apply(self, note: Note) -> None:
        match note.kind:
            case NoteKind.DRAINED:
                self.drained = max(self.drained, note.position)
            case NoteKind.SPLIT:
                self._splits.add(note.position)
            case NoteKind.RENEWED:
                self.renewals.apply(note)

    @property
    def size(self) -> int:
        """Bytes of the log that are not drained."""
        return self._log.end - self.drained if self.waiting else 0

    @property
    def refused(self) -> int:
        """Messages that the broker refused for good."""
        return sum(name.count for name in self._refused)

    def refusal_of(self, session: bytes, sequence: int) -> str | None:
        """Return the text of the refusal of a message, None without one."""
        for name in list(self._refused):
            if name.session == session and 0 <= sequence - name.sequence < name.count:
                found = (
                    refusal
                    for batch, refusal in read_refused(self._fs, self.path)
                    if name_of(batch) == name
                )
                return next((f"{refusal.error}: {refusal.text}" for refusal in found), "removed")
        return None

    @property
    def oldest_at(self) -> int:
        """The time at which the oldest waiting message was stored here, 0 = none."""
        if not self.waiting:
            return 0
        waiting = (some.batches[0] for some in self.read(self.drained) if some.batches)
        return next((batch.stored_at for batch in waiting), 0)

    def stage(self, batches: Iterable[SpooledBatch], now: int) -> None:
        """Stage batches, all or none."""
        listed = list(batches)
        size = sum(len(batch.encoded) + _RECORD_OVERHEAD for batch in listed)
        self.require_space(size)
        for batch in listed:
            self._append(BATCH, encode_batch(batch), batch.encoded, now)
            self.waiting += batch.count

    def flush(self) -> None:
        """Bring everything staged to disk. After DiskFull it may be called again."""
        if not self.identity.begun:  # so that a log that is gone is missed
            self._set_identity(self.identity._replace(begun=True))
        crashpoint("spool.before_write")
        self._write(sync=True)
        crashpoint("spool.after_write")

    def read(self, position: int) -> Iterator[ToSend]:
        """Yield what the records on disk from a position on have to send."""
        for record in self._log.scan(max(position, self._log.first)):
            batch = decode_record(record) if record.kind == BATCH else None
            if isinstance(batch, SpooledBatch):
                rows = batch.rows() if record.position in self._splits else (batch,)
                unsettled = [row for row in rows if name_of(row) not in self._refused]
                yield ToSend(unsettled, record.end)

    @property
    def end(self) -> int:
        """The position after the last record on disk."""
        return self._log.durable

    def split(self, batch: SpooledBatch) -> None:
        """Have the batch of a record sent row by row from now on. Durable at return."""
        self._note(Note(NoteKind.SPLIT, batch.position))
        crashpoint("spool.after_split")

    def renew(self, batch: SpooledBatch) -> None:
        """Have a batch and all later ones of its session sent in a new session, for a
        broker that lets no session skip sequences. Durable at return.
        """
        note = self.renewals.add(batch.session, batch.sequence)
        self._append(NOTE, encode_note(note), b"", batch.stored_at)
        self.flush()

    def refuse(self, batch: SpooledBatch, refusal: Refusal) -> None:
        """Put a batch aside; the rest of its session is sent without it."""
        crashpoint("spool.before_refuse")
        write_refused(self._fs, self.path, batch, refusal)
        crashpoint("spool.after_refuse")
        self._refused.add(name_of(batch))

    def refused_before(self, batch: SpooledBatch) -> bool:
        """Return whether the messages right before a batch were put aside."""
        return any(
            name.session == batch.session and name.sequence + name.count == batch.sequence
            for name in self._refused
        )

    def retry_refused(self, now: int) -> int:
        """Have the refused batches sent again behind everything, and return the number
        of their messages.

        They get a session of their own each, because their old ones went on without
        them: the same one in every copy.
        """
        taken = 0
        waiting = {batch.session for some in self.read(self.drained) for batch in some.batches}
        for batch, _refusal in list(read_refused(self._fs, self.path)):
            name = name_of(batch)
            encoded = with_producer(batch.encoded, retried_session(batch), 0)
            if retried_session(batch) not in waiting:  # a process may have died here
                self.stage([_restamped(batch, encoded)], now)
                self.flush()
            crashpoint("spool.after_retry")
            remove_refused(self._fs, self.path, name)
            self._refused.discard(name)
            taken += batch.count
        return taken

    def mark_drained(self, position: int, messages: int) -> None:
        """Note that everything before a position is drained. Durable some time later:
        the sequences make a repetition harmless.
        """
        crashpoint("spool.before_mark")
        self.drained = max(self.drained, position)
        self.waiting = max(0, self.waiting - messages)
        try:
            self._append(NOTE, encode_note(Note(NoteKind.DRAINED, position)), b"", 0)
            self._write(sync=False)
        except DiskFull:
            pass  # the next mark says the same
        crashpoint("spool.after_mark")
        for segment in self._log.release_before(self.drained):
            self._log.remove(segment)

    def set_log(self, log_id: UUID, incarnation: UUID | None) -> None:
        """Note the log of the broker and its incarnation."""
        identity = self.identity._replace(log_id=log_id, incarnation=incarnation)
        if identity != self.identity:
            self._set_identity(identity)

    def _set_identity(self, identity: Identity) -> None:
        write_identity(self._fs, self.path, identity)
        self.identity = identity

    def close(self) -> None:
        """Release the spool, and remove it where nothing waits, and nothing was refused
        or put aside. Idempotent.
        """
        if not (self._closed or self.waiting or self._refused or self._unwritten):
            with suppress(StoreError):  # what is left of it is empty
                names = self._fs.listdir(log_directory(self.path))
                if all(position_of_segment(name) is not None for name in names):
                    self._remove()
        self._closed = True
        self._log.close()

    def abandon(self) -> None:
        """Let go of the spool as it is, also in the child of a fork: a thread that is
        not there may hold the log's locks.
        """
        self._lock.release()

    def _remove(self) -> None:
        if self.identity.begun:  # a log that is gone is as it should be
            self._set_identity(self.identity._replace(begun=False))
        crashpoint("spool.before_remove")
        remove_tree(self._fs, self.path, LOCK, ("log", FOLDER))

    def require_space(self, size: int) -> None:
        """Raise DiskFull where the disk has no room for so many bytes."""
        if self._unwritten is not None:
            self.flush()
        if self._log.read_only and not self._log.try_space():
            raise self._disk_full()
        if self._fs.space(self.path).free < size + _SPARE:
            raise self._disk_full()

    def _disk_full(self) -> DiskFull:
        return DiskFull(
            f"{self.path}: no space for the spool", hint="free space on that disk, or wait"
        )

    def _append(self, kind: int, head: bytes, attachment: bytes, now: int) -> None:
        self._log.append(kind, head, attachment, stored_at=now, boot_epoch=_BOOT_EPOCH)

    def _note(self, note: Note) -> None:
        self._append(NOTE, encode_note(note), b"", 0)
        self._apply(note)
        self.flush()

    def _write(self, *, sync: bool) -> None:
        if self._log.read_only and not self._log.try_space():
            raise self._disk_full()
        self._unwritten = self._unwritten or self._log.cut()
        while self._unwritten is not None:
            self._log.write(self._unwritten, sync=sync)
            self._log.complete(self._unwritten)
            self._unwritten = self._log.cut()


def _restamped(batch: SpooledBatch, encoded: bytes) -> SpooledBatch:
    return SpooledBatch.of(
        batch.topic, batch.partition, batch.epoch, encoded, explicit=batch.explicit, doubtful=True
    )


def is_blank(fs: FileSystem, path: str) -> bool:
    """Return whether a directory has no spool yet, or no longer: another process makes
    or removes it, or died when it did.
    """
    return not _has_log(fs, path) and NAME not in fs.listdir(path)


def _has_log(fs: FileSystem, path: str) -> bool:
    names = fs.listdir(log_directory(path))
    return any(position_of_segment(name) is not None for name in names)


def identity_of(fs: FileSystem, path: str, new: Identity | None) -> Identity:
    """Return the identity of a locked spool; write `new` where there is none."""
    identity = read_identity(fs, path)
    if identity is not None:
        if identity.begun and not _has_log(fs, path):
            raise StoreError(
                f"{path}: the log of this spool is gone, and what waited in it",
                hint="bring the directory 'log' back from a copy, or remove this directory",
            )
        return identity
    if new is None or _has_log(fs, path):
        raise StoreError(
            f"{path}: a log without its spool's identity",
            hint="move this directory away, or restore its identity.json",
        )
    write_identity(fs, path, new)
    fs.sync_directory(path.rpartition("/")[0])
    crashpoint("spool.created")
    return new


def _open_log(
    fs: FileSystem, path: str, lock: FileLock, now: int, segment_size: int, preallocate: int
) -> tuple[Log, TornTail | None]:
    segments = list_segments(fs, path)
    log, report = Log.open(
        fs,
        path,
        now=now,
        positions=KnownPositions(scan_from=segments[0].first if segments else 0),
        lock=lock,
        segment_size=segment_size,
        preallocate=preallocate,
    )
    return log, report.torn
