"""The LMDB environment of the state tables (docs/FORMATS.md 5): opened, checked, made
anew when it is of no use.

It is a cache of snapshot and log: one that is damaged or stands for another log is
thrown away, and the reason told. Only another version's is refused: its owner may want
to go back to it.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import msgpack
from lmdb import Environment, Transaction, _Database

from txmq.errors import DiskFull, StoreError, UnsupportedFormat
from txmq.store.fs import RealFileSystem
from txmq.store.tables import META, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

VERSION = 1
VERSION_KEY, LOG_ID_KEY, POSITION_KEY = b"version", b"log_id", b"position"
RESERVED = frozenset(
    (VERSION_KEY, LOG_ID_KEY, POSITION_KEY)
)  # keys of `meta` that are the environment's own

DATA, LOCK = "data.mdb", "lock.mdb"
AHEAD = 16 << 20  # bytes (sparse) by which the file is made longer than it has to be

Databases = dict[str, _Database]
UNREADABLE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
    lmdb.PanicError,
)


class Opened(NamedTuple):
    """An environment ready for use. `reason` says why the one found before was
    discarded, empty if none was.
    """

    env: Environment
    databases: Databases
    position: int
    reason: str


def open_environment(path: Path, log_id: UUID, *, map_size: int, log_end: int | None) -> Opened:
    """The environment in the directory `path`, made if need be.

    Raises UnsupportedFormat where another version of txmq wrote it, StoreError where
    the disk or the kernel refuses.
    """
    with translated(path):
        path.mkdir(parents=True, exist_ok=True)
        reason = ""
        if (path / DATA).exists():
            reason, found = _open_found(path, log_id, map_size, log_end)
            if found is not None:
                return found
            _remove(path)
        return _created(path, log_id, map_size, reason)


@contextmanager
def writing(env: Environment) -> Iterator[Transaction[bytes]]:
    """A write transaction, committed at the end, aborted by an error."""
    with translated(Path(env.path())):
        with env.begin(write=True) as txn:
            yield txn
        _keep_long_enough(env)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what LMDB and the file system raise into this project's errors."""
    try:
        yield
    except (lmdb.DiskError, lmdb.MapFullError) as error:
        raise DiskFull(
            f"{path}: {error}", hint="nothing is lost, the log has it; make space"
        ) from error
    except lmdb.MemoryError as error:
        hint = "the address space is too small: raise the limit (ulimit -v) or lower the map size"
        raise StoreError(f"{path}: {error}", hint=hint) from error
    except (lmdb.Error, OSError) as error:
        hint = "the index is a cache: with the broker stopped it may be deleted, it is rebuilt from snapshot and log"
        raise StoreError(f"{path}: {error}", hint=hint) from error


def write_identity(
    txn: Transaction[bytes], databases: Databases, log_id: UUID, position: int
) -> None:
    """Mark the contents as whole: without these rows an environment counts as
    unfinished.
    """
    txn.put(VERSION_KEY, msgpack.packb([VERSION]), db=databases[META])
    txn.put(LOG_ID_KEY, msgpack.packb([log_id.bytes]), db=databases[META])
    write_position(txn, databases, position)


def write_position(txn: Transaction[bytes], databases: Databases, position: int) -> None:
    txn.put(POSITION_KEY, msgpack.packb([position]), db=databases[META])


def read_position(txn: Transaction[bytes], databases: Databases) -> int:
    position: int = msgpack.unpackb(txn.get(POSITION_KEY, None, databases[META]))[0]
    return position


@contextmanager
def reading(path: Path, log_id: UUID) -> Iterator[tuple[Transaction[bytes], Databases]]:
    """A transaction on the environment of a broker that may be running, from another
    process.

    Raises StoreError where there is none, or one of no use.
    """
    with translated(path):
        env = lmdb.open(str(path), readonly=True, create=False, max_dbs=len(NAMES), map_size=0)
        try:
            reason = _unfit(env, log_id, None)
            if reason:
                raise StoreError(f"{path}: {reason}")
            databases = {name: env.open_db(name.encode(), create=False) for name in NAMES}
            with env.begin() as txn:
                yield txn, databases
        finally:
            env.close()


def remove_environment(path: Path) -> None:
    """Delete the environment, if there is one; nobody may have it open."""
    with translated(path):
        if (path / DATA).exists():
            _remove(path)


def _keep_long_enough(env: Environment) -> None:
    """Make the file at least as long as LMDB thinks it is.

    LMDB does not write pages that a transaction both took and freed. If those at the
    end of the file stayed unwritten, nobody could tell a whole file from one that was
    cut, and reading past the end of a mapped file kills the process.
    """
    data = Path(env.path()) / DATA
    needed = _length(env)
    if data.stat().st_size < needed:
        os.truncate(data, needed + AHEAD)


def _length(env: Environment) -> int:
    return (env.info()["last_pgno"] + 1) * env.stat()["psize"]


def _open_found(
    path: Path, log_id: UUID, map_size: int, log_end: int | None
) -> tuple[str, Opened | None]:
    """The environment, or the reason why it cannot be used."""
    try:
        env = _open(path, map_size)
    except UNREADABLE as error:
        return f"unreadable: {error}", None
    usable = None
    try:
        reason = _unfit(env, log_id, log_end)
        if not reason:
            usable = _opened(env)
    except (*UNREADABLE, ValueError, TypeError, LookupError) as error:
        reason = f"unreadable: {error}"
    finally:
        if usable is None:
            env.close()
    return reason, usable


def _unfit(env: Environment, log_id: UUID, log_end: int | None) -> str:
    path = Path(env.path())
    if (path / DATA).stat().st_size < _length(env):
        return "the file was cut short"
    try:
        meta = env.open_db(META.encode(), create=False)
    except lmdb.NotFoundError:
        return "it was never finished"
    with env.begin() as txn:
        rows = {
            bytes(key): msgpack.unpackb(value)[0]
            for key, value in txn.cursor(meta)
            if key in RESERVED
        }
    if VERSION_KEY not in rows:
        return "it was never finished"
    if rows[VERSION_KEY] != VERSION:
        raise UnsupportedFormat(str(path), rows[VERSION_KEY], VERSION)
    if rows[LOG_ID_KEY] != log_id.bytes:
        return "it stands for another log"
    if log_end is not None and rows[POSITION_KEY] > log_end:
        return f"it stands for position {rows[POSITION_KEY]}, and the log ends at {log_end}"
    return ""


def _open(path: Path, map_size: int) -> Environment:
    # metasync=False: a power cut may take the newest commits back but never tears one,
    # and the log has them. One spare transaction: the reactor's reader is renewed after
    # each commit.
    return lmdb.open(
        str(path), map_size=map_size, max_dbs=len(NAMES), metasync=False, max_spare_txns=1
    )


def _opened(env: Environment) -> Opened:
    databases = {name: env.open_db(name.encode()) for name in NAMES}
    with env.begin() as txn:
        return Opened(env, databases, read_position(txn, databases), "")


def _created(path: Path, log_id: UUID, map_size: int, reason: str) -> Opened:
    env = _open(path, map_size)
    with writing(env) as txn:
        databases = {name: env.open_db(name.encode(), txn) for name in NAMES}
        write_identity(txn, databases, log_id, 0)
    _sync_names(path)
    return Opened(env, databases, 0, reason)


def _remove(path: Path) -> None:
    """Delete the environment's own two files, nothing else that somebody may have put
    there; no power cut brings them back.
    """
    (path / DATA).unlink()
    (path / LOCK).unlink(missing_ok=True)
    _sync_names(path)


def _sync_names(path: Path) -> None:
    """LMDB syncs its file, not the name of it."""
    for directory in (path, path.parent):
        RealFileSystem().sync_directory(str(directory))
