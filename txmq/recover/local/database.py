"""A SQLite file in a directory that one process owns, and its group commit.

The first thread that waits commits for all; those that come meanwhile share the next
commit, and so its sync. Readers see only what is committed.

    lock     a file with the pid of the owner, whose flock is on the directory
    *.db     the file, with its -wal and -shm

The lock file is made after the database, and removed before it. So a directory with a
lock and without a database has lost it; one with neither was begun only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Condition, Lock
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote
from weakref import WeakSet

from google_crc32c import value as crc32c
from msgpack import packb

from txmq.crashpoints import crashpoint
from txmq.errors import (
    DirectoryInUse,
    DiskFull,
    ForeignStore,
    StoreClosed,
    StoreError,
    TxmqError,
    UnsupportedFormat,
)
from txmq.store.filesystem import store_error

T = TypeVar("T")
LOCK = "lock"
DRAFT = ".new"
PAGE = 8192
CHECKPOINT_PAGES = 8_000  # of the write-ahead log, which then is written from its start
BUSY_S = 10.0  # that a commit waits for a reader which begins
LOCK_TRIES, LOCK_PAUSE_S = 3, 0.02  # lists look at locks, for a moment
REMOVALS = 10  # of a directory, while readers end
FEW_PAGES = 1_000  # free ones that are not worth a rewrite of the file
ABOUT = "CREATE TABLE about (name TEXT PRIMARY KEY, value) WITHOUT ROWID;"
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_UNREADABLE = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ}


class Form(NamedTuple):
    """A kind of database: what it is called, its file, its tables, their version."""

    kind: str
    file: str
    schema: str
    version: int = 1


class Damaged(Exception):
    """SQLite cannot read the file, or a part of it."""


def checksum(*fields: object) -> int:
    """Return the checksum of a row's fields, whatever they are by now."""
    return int(crc32c(packb(fields)))


class DirectoryLock:
    """The flock of a directory's owner, until `release` or the end of the process."""

    def __init__(self, path: str) -> None:
        """Raises DirectoryInUse where another process has it."""
        self._path = path
        with os_errors("lock", path):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags)
        for left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if left:
                    time.sleep(LOCK_PAUSE_S)
        self.release()
        pid = owner_pid(path)
        raise DirectoryInUse(
            f"{path}: in use by {f'the process {pid}' if pid > 0 else 'another process'}",
            hint="stop that process, or give this one a directory of its own",
        )

    def name_owner(self) -> None:
        """Write the lock file: from now on the database is missed if it is gone."""
        with os_errors("lock", self._path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            # whatever lies there: nothing is followed, and nothing is waited for
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(f"{self._path}/{LOCK}", flags, 0o600)
            try:
                os.write(fd, b"%d\n" % os.getpid())
            finally:
                os.close(fd)

    def release(self) -> None:
        """Release it; in the child of a fork the parent keeps it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def owner_pid(path: str) -> int:
    """Return the process that owns a directory: 0 = none, -1 = one not known."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released with the descriptor
        return 0
    except BlockingIOError:
        with suppress(OSError, ValueError):
            return int(Path(path, LOCK).read_bytes()[:32])
        return -1
    finally:
        os.close(fd)


def is_begun_only(path: str, form: Form) -> bool:
    """Return whether a process makes or removes the database in a directory, or died
    when it did.
    """
    return not Path(path, form.file).exists() and not Path(path, LOCK).exists()


@contextmanager
def os_errors(doing: str, path: str) -> Iterator[None]:
    """Raise errors of the operating system as StoreError or DiskFull."""
    try:
        yield
    except OSError as error:
        raise store_error(doing, path, error) from error


@contextmanager
def sql_errors(path: str) -> Iterator[None]:
    """Raise errors of SQLite as DiskFull, Damaged or StoreError."""
    try:
        yield
    except UnicodeDecodeError as error:  # of a text of SQLite's, with a name in it
        raise Damaged(str(error)) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None) or 0
        if code in _FULL:
            hint = "free space on that disk; what is stored stays"
            raise DiskFull(f"{path}: no space on the disk", hint=hint) from error
        if code & 0xFF in _DAMAGED or code in _UNREADABLE:
            raise Damaged(str(error)) from error
        hint = "check the kernel's messages about the disk, and owner and mode of the path"
        raise StoreError(f"{path}: {error}", hint=hint) from error


def sync_directory(path: str) -> None:
    """Return once the names in a directory are on disk."""
    with os_errors("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def create(
    path: str,
    form: Form,
    rows: Mapping[str, object],
    fill: Callable[[sqlite3.Connection], object] = lambda _: None,
) -> None:
    """Make the database in a directory: what it says of itself, and what `fill` writes.

    A crash leaves it whole, or a draft.
    """
    file = f"{path}/{form.file}"
    draft = Path(f"{file}{DRAFT}")
    with os_errors("create", file):
        for left in (draft, Path(f"{draft}-journal")):  # of a process that died here
            left.unlink(missing_ok=True)
        draft.touch(mode=0o600, exist_ok=False)
    crashpoint("local_store.before_create")
    with sql_errors(file), closing(connect(str(draft), "mode=rw")) as connection:
        connection.executescript(
            f"PRAGMA page_size={PAGE}; PRAGMA user_version={form.version};"
            f"BEGIN; {ABOUT} {form.schema}"
        )
        named = {"kind": form.kind, **rows}
        connection.executemany("INSERT INTO about VALUES (?, ?)", named.items())
        fill(connection)
        connection.execute("COMMIT")
    with os_errors("create", file):
        draft.rename(file)
    sync_directory(path)
    crashpoint("local_store.after_create")


def open_connection(path: str, form: Form) -> sqlite3.Connection:
    """Open the database in a directory, for its owner.

    Raises Damaged, UnsupportedFormat, ForeignStore, and StoreError for what is no
    regular file.
    """
    file = f"{path}/{form.file}"
    _require_regular(file)
    with sql_errors(file):
        connection = connect(file, "mode=rw")
        try:
            connection.executescript(
                f"PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES};"
                "PRAGMA cell_size_check=ON; PRAGMA synchronous=FULL;"
            )
            require_form(file, form, connection)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def read_only(path: str, form: Form) -> Iterator[sqlite3.Connection]:
    """Open the database in a directory beside its owner, or in a copy, to be read."""
    file = f"{path}/{form.file}"
    if not Path(file).exists():
        raise gone(path, form)
    _require_regular(file)
    log = Path(f"{file}-wal")
    # Nothing is made in the directory of a database that was closed as it should be.
    closed = not owner_pid(path) and not (log.exists() and log.stat().st_size)
    try:
        how = "mode=ro&immutable=1" if closed else "mode=ro"
        with sql_errors(file), closing(connect(file, how)) as connection:
            require_form(file, form, connection)
            yield connection
    except Damaged as error:
        raise StoreError(
            f"{file}: damaged: {error}",
            hint="its owner sets it aside at the next start, with what can be read of it",
        ) from error


def gone(path: str, form: Form) -> StoreError:
    """Return the error for a directory without its database."""
    return StoreError(
        f"{path}: {form.file} is gone, and what waited in it",
        hint=f"bring {form.file} back from a copy, or remove this directory",
    )


def require_form(file: str, form: Form, connection: sqlite3.Connection) -> None:
    """Require a database of this kind and version."""
    [version] = connection.execute("PRAGMA user_version").fetchone()
    tables = "SELECT count(*) FROM sqlite_master WHERE name = 'about'"
    if connection.execute(tables).fetchone() == (0,):
        raise Damaged("it has no tables")
    if version > form.version:
        raise UnsupportedFormat(file, version, form.version)
    kind = about(connection).get("kind")
    if kind != form.kind:
        raise ForeignStore(
            f"{file}: a {str(kind)[:40]!r}, no {form.kind}",
            hint="give each store a directory of its own, or move this one away",
        )


def about(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return what the database says of itself."""
    return dict(connection.execute("SELECT name, value FROM about"))


def connect(file: str, how: str) -> sqlite3.Connection:
    """Open a file as SQLite does, with parameters of its URI.

    Texts that are no UTF-8 any more are read as well: their checksums tell.
    """
    connection = sqlite3.connect(
        f"file:{quote(file)}?{how}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_S,
    )
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    return connection


def _require_regular(file: str) -> None:
    """Require regular files: links are not followed."""
    for name in (file, f"{file}-wal", f"{file}-shm"):
        with os_errors("open", name), suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(name).st_mode):
                raise StoreError(f"{name}: not a regular file", hint="move it away")


class _Job(Generic[T]):
    """Work for a transaction, which another thread may do."""

    result: T
    error: BaseException | None = None
    done = False

    def __init__(
        self, work: Callable[[sqlite3.Connection], T], *, synced: bool, keep: bool
    ) -> None:
        self.work, self.synced, self.keep = work, synced, keep


class Database:
    """An open database. Any thread may call any method.

    `kept`: work waits for space. `make_room` is called once where the disk is full, and
    returns whether it made some. `undone` is called after a transaction that failed.
    """

    def __init__(
        self, path: str, form: Form, connection: sqlite3.Connection, lock: DirectoryLock
    ) -> None:
        self.path, self.what = path, form.kind
        self.file = f"{path}/{form.file}"
        self._connection, self._lock, self._pid = connection, lock, os.getpid()
        self._changed = Condition(Lock())
        self._jobs: list[_Job[Any]] = []
        self._busy = self._unsynced = self._closed = False
        self._synced = True  # as commits are set to be
        self.failure = ""
        self.make_room: Callable[[], bool] = lambda: False
        self.undone: Callable[[sqlite3.Connection], None] = lambda _: None
        _open.add(self)

    @property
    def kept(self) -> bool:
        return any(job.done for job in self._jobs)

    def run(
        self,
        work: Callable[[sqlite3.Connection], T],
        *,
        synced: bool = True,
        keep: bool = False,
    ) -> T:
        """Do work in a transaction, with what other threads want done meanwhile.

        It is on disk at return; without `synced` soon after that. Work raises TxmqError
        or ValueError before it changes anything. With `keep`, work that raised DiskFull
        is done with the next transaction, without `keep` never.
        """
        job = _Job(work, synced=synced, keep=keep)
        self._require_own_process()
        with self._changed:
            self._require_open()
            self._jobs.append(job)
            while not job.done:
                if self._busy:
                    self._changed.wait()
                else:
                    self._commit_all()
        if job.error is not None:
            raise job.error
        return job.result

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do work that changes nothing; it sees what is committed."""
        self._require_own_process()
        with self._changed:
            while self._busy:
                self._changed.wait()
            self._require_open()
            try:
                with sql_errors(self.path):
                    return work(self._connection)
            except (Damaged, StoreError) as error:
                raise self._fail(error) from error

    def write_kept(self) -> None:
        """Write what waits for space. Raises DiskFull where there still is none."""
        if self.kept:
            self.run(lambda _: None)

    def settle(self) -> None:
        """Bring to disk what was committed without a sync, and what waits for space."""
        self._require_own_process()
        self._require_open()
        if self._unsynced or self.kept:
            touch = "UPDATE about SET value = value WHERE name = 'kind'"
            self.run(lambda connection: connection.execute(touch))

    def free_space(self) -> int:
        """Return the bytes that are free on the disk."""
        with os_errors("space", self.path):
            found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def disk_bytes(self) -> int:
        """Return the size of the files."""
        files = [Path(f"{self.file}{end}") for end in ("", "-wal")]
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self, *, remove: bool = False) -> None:
        """Close it; other calls then raise StoreClosed. Idempotent; in the child of a
        fork it does nothing. With `remove`, remove it with its directory.
        """
        if os.getpid() != self._pid:
            return
        with suppress(DiskFull, StoreClosed):
            self.write_kept()
        with self._changed:
            while self._busy:
                self._changed.wait()
            if self._closed:
                return
            self._closed = True
            self.failure = self.failure or "is closed"
            self._changed.notify_all()
            with suppress(sqlite3.Error):
                self._connection.close()
            if remove:
                self._remove()
            self._lock.release()

    def _remove(self) -> None:
        """Remove the files, the lock first, and the directory unless more is there.

        SQLite may make some anew for one that reads, which cannot open it again.
        """
        files = (f"{self.path}/{LOCK}", self.file, f"{self.file}-wal", f"{self.file}-shm")
        for _ in range(REMOVALS):
            with suppress(OSError):  # what is left in the end was begun only, or is empty
                for file in files:
                    Path(file).unlink(missing_ok=True)
                Path(self.path).rmdir()
                return

    def leave_to_parent(self) -> None:
        """Let go of everything in the child of a fork: SQLite would remove the
        write-ahead log of its parent, and a thread that is not here may hold its locks.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))  # never closed
        self._lock.release()

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed(
                f"{self.path}: the {self.what} belongs to process {self._pid}, from which this"
                " one was forked",
                hint="open one after the fork",
            )

    def _require_open(self) -> None:
        if self.failure:
            raise StoreClosed(
                f"{self.path}: the {self.what} {self.failure}",
                hint="open it again: what was acknowledged is on disk",
            )

    def _fail(self, error: BaseException) -> StoreClosed:
        """Take no more work; return the error for whoever waits."""
        self.failure = self.failure or f"failed: {error}"
        return StoreClosed(
            f"{self.path}: the {self.what} failed: {error}",
            hint="check the kernel's messages about the disk; then open it again: what was"
            " acknowledged is on disk",
        )

    def _commit_all(self) -> None:
        """Do the jobs that wait. Called with the lock, which is released meanwhile."""
        jobs, self._jobs = self._jobs, []
        left: list[_Job[Any]] = []
        self._busy = True
        self._changed.release()
        try:
            left = self._transact(jobs)
        finally:
            self._changed.acquire()
            self._busy = False
            self._jobs[:0] = left
            for job in jobs:
                job.done = True
            self._changed.notify_all()

    def _transact(self, jobs: list[_Job[Any]]) -> list[_Job[Any]]:
        """Do jobs in one transaction; return those to be done with the next one."""
        try:
            try:
                self._attempt(jobs)
            except DiskFull:
                if not self.make_room():
                    raise
                self._attempt(jobs)
        except DiskFull as error:
            _give_up(jobs, error)
            return [job for job in jobs if job.keep]
        except (Damaged, StoreError) as error:
            failed = self._fail(error)
            failed.__cause__ = error
            _give_up(jobs, failed)
        except BaseException as error:
            self._fail(error)
            _give_up(jobs, error)
            raise
        return []

    def _attempt(self, jobs: list[_Job[Any]]) -> None:
        try:
            self._do(jobs)
        except BaseException:
            with suppress(sqlite3.Error):
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                self.undone(self._connection)
            raise

    def _do(self, jobs: list[_Job[Any]]) -> None:
        synced = any(job.synced for job in jobs)
        with sql_errors(self.path):
            if synced != self._synced:
                self._set_synced(synced=synced)
            self._connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                job.error = None
                try:
                    job.result = job.work(self._connection)
                except (TxmqError, ValueError) as error:
                    job.error = error
            crashpoint("local_store.before_commit")
            self._commit()
        self._unsynced = not synced
        crashpoint("local_store.after_commit")

    def _commit(self) -> None:
        self._connection.execute("COMMIT")

    def _set_synced(self, *, synced: bool) -> None:
        self._connection.execute(f"PRAGMA synchronous={'FULL' if synced else 'NORMAL'}")
        self._synced = synced


def _give_up(jobs: list[_Job[Any]], error: BaseException) -> None:
    for job in jobs:
        job.error = error


# of this process; in the child of a fork those of its parent
_open: WeakSet[Database] = WeakSet()


def _leave_to_parent() -> None:
    for database in list(_open):
        database.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
