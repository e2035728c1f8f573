"""The LMDB environment of the state tables (docs/FORMATS.md 5): open, check, recreate.

The environment is a cache of snapshot and log. One that is damaged or of another log is
discarded, with the reason reported; digests show the damage (`digest`). One of another
version is refused instead, because the operator may want to return to that version.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import msgpack
from lmdb import Environment, Transaction, _Database

from txmq.errors import DiskFull, StoreError, UnsupportedFormat
from txmq.store.filesystem import RealFileSystem, not_permitted
from txmq.store.index.digest import (
    DATA,
    EMPTY,
    LOG_ID_KEY,
    POSITION_KEY,
    UNREADABLE,
    VERSION_KEY,
    Digests,
    find_damage,
    read_digests,
    write_digests,
)
from txmq.store.tables import META, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

VERSION = 1

LOCK = "lock.mdb"
AHEAD = 16 << 20  # bytes (sparse) by which the file is extended beyond what LMDB needs

Databases = dict[str, _Database]


class Layout(NamedTuple):
    """The tables of an environment, META among them.

    `digests`: they have digests, against which the whole file is walked at opening. An
    environment without them is for owners that notice damage in another way.
    """

    names: tuple[str, ...] = NAMES
    digests: bool = True


STATE = Layout()  # the broker's


class OpenedEnvironment(NamedTuple):
    """An environment ready for use.

    `reason` says why an earlier one was discarded; empty if none was.
    """

    env: Environment
    databases: Databases
    position: int
    digests: Digests
    reason: str


def has_environment(path: Path) -> bool:
    """Return whether the directory `path` has an environment, finished or not."""
    return (path / DATA).exists()


def open_environment(
    path: Path, log_id: UUID, *, map_size: int, log_end: int | None, layout: Layout = STATE
) -> OpenedEnvironment:
    """Open the environment in the directory `path`, or create it.

    Raises UnsupportedFormat where another version of txmq wrote it, StoreError where
    the disk or the kernel fails.
    """
    with translate_errors(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = ""
        if has_environment(path):
            reason, existing = _open_existing(path, log_id, map_size, log_end, layout)
            if existing is not None:
                return existing
            _remove(path)
        return _created(path, log_id, map_size, reason, layout)


@contextmanager
def write_transaction(env: Environment) -> Iterator[Transaction[bytes]]:
    """Run a write transaction, committed at the end and aborted by an error."""
    with translate_errors(Path(env.path())):
        with env.begin(write=True) as txn:
            yield txn
        _extend_file(env)


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn errors of LMDB and the file system into errors of txmq."""
    try:
        yield
    except (lmdb.DiskError, lmdb.MapFullError) as error:
        raise DiskFull(
            f"{path}: {error}", hint="free space on that disk; nothing is lost, the log has it"
        ) from error
    except lmdb.MemoryError as error:
        hint = "raise the limit of address space (ulimit -v), or lower the map size"
        raise StoreError(f"{path}: {error}", hint=hint) from error
    except (lmdb.Error, OSError) as error:
        if str(error).endswith(os.strerror(errno.EACCES)) or isinstance(error, PermissionError):
            raise StoreError(f"{path}: {error}", hint=not_permitted()) from error
        hint = "stop the broker and delete the index: it is rebuilt from snapshot and log"
        raise StoreError(f"{path}: {error}", hint=hint) from error


def write_identity(
    txn: Transaction[bytes], databases: Databases, log_id: UUID, position: int, digests: Digests
) -> None:
    """Write the rows that mark the contents as complete.

    An environment without them counts as unfinished.
    """
    txn.put(VERSION_KEY, msgpack.packb([VERSION]), db=databases[META])
    txn.put(LOG_ID_KEY, msgpack.packb([log_id.bytes]), db=databases[META])
    write_position(txn, databases, position, digests)


def write_position(
    txn: Transaction[bytes], databases: Databases, position: int, digests: Digests
) -> None:
    """Write the position that the rows stand for, and the digests of their tables."""
    txn.put(POSITION_KEY, msgpack.packb([position]), db=databases[META])
    write_digests(txn, databases[META], digests, position)


def read_position(txn: Transaction[bytes], databases: Databases) -> int:
    position: int = msgpack.unpackb(txn.get(POSITION_KEY, None, databases[META]))[0]
    return position


@contextmanager
def read_transaction(path: Path, log_id: UUID) -> Iterator[tuple[Transaction[bytes], Databases]]:
    """Run a read transaction on an environment that a broker may have open.

    Raises StoreError where there is none, or an unusable one.
    """
    with translate_errors(path):
        env = lmdb.open(str(path), readonly=True, create=False, max_dbs=len(NAMES), map_size=0)
        try:
            reason = _defect(env, log_id, None)
            if reason:
                raise StoreError(f"{path}: {reason}")
            databases = {name: env.open_db(name.encode(), create=False) for name in NAMES}
            with env.begin() as txn:
                yield txn, databases
        finally:
            env.close()


def remove_environment(path: Path) -> None:
    """Delete the environment, if there is one. No process may have it open."""
    with translate_errors(path):
        if has_environment(path):
            _remove(path)


def _extend_file(env: Environment) -> None:
    """Extend the file to at least the length that LMDB assumes.

    LMDB does not write pages that one transaction allocated and freed. If those at the
    end of the file stayed unwritten, a whole file would look like one that was cut; and
    reading past the end of a mapped file kills the process.
    """
    data = Path(env.path()) / DATA
    needed = _used_length(env)
    if data.stat().st_size < needed:
        os.truncate(data, needed + AHEAD)


def _used_length(env: Environment) -> int:
    """Return the bytes of the file up to the last page that LMDB uses."""
    length: int = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    return length


def _open_existing(
    path: Path, log_id: UUID, map_size: int, log_end: int | None, layout: Layout
) -> tuple[str, OpenedEnvironment | None]:
    """Return the environment, or the reason why it cannot be used."""
    damage = find_damage(path) if layout.digests else ""
    if damage:
        return damage, None
    try:
        env = _open(path, map_size, layout)
    except UNREADABLE as error:
        return f"unreadable: {error}", None
    usable = None
    try:
        reason = _defect(env, log_id, log_end)
        if not reason and (path / DATA).stat().st_size < _used_length(env):
            reason = "the file was cut short"
        if not reason:
            usable = _opened(env, layout)
    except (*UNREADABLE, ValueError, TypeError, LookupError) as error:
        reason = f"unreadable: {error}"
    finally:
        if usable is None:
            env.close()
    return reason, usable


def _defect(env: Environment, log_id: UUID, log_end: int | None) -> str:
    try:
        meta = env.open_db(META.encode(), create=False)
    except lmdb.NotFoundError:
        return "it was never finished"
    with env.begin() as txn:
        rows = {
            bytes(key): msgpack.unpackb(value)[0]
            for key, value in txn.cursor(meta)
            if key in (VERSION_KEY, LOG_ID_KEY, POSITION_KEY)
        }
    if VERSION_KEY not in rows:
        return "it was never finished"
    if rows[VERSION_KEY] != VERSION:
        raise UnsupportedFormat(env.path(), rows[VERSION_KEY], VERSION)
    if rows[LOG_ID_KEY] != log_id.bytes:
        return "it stands for another log"
    if log_end is not None and rows[POSITION_KEY] > log_end:
        return f"it stands for position {rows[POSITION_KEY]}, and the log ends at {log_end}"
    return ""


def _open(path: Path, map_size: int, layout: Layout) -> Environment:
    # metasync=False: a power cut may undo the newest commits, which the log has, but
    # tears none. One spare transaction: the reactor's reader is renewed after each
    # commit.
    return lmdb.open(
        str(path),
        map_size=map_size,
        max_dbs=len(layout.names),
        metasync=False,
        max_spare_txns=1,
        mode=0o600,
    )


def _opened(env: Environment, layout: Layout) -> OpenedEnvironment:
    databases = {name: env.open_db(name.encode()) for name in layout.names}
    with env.begin() as txn:
        found = read_digests(txn, databases[META])
        digests = {} if found is None else found[1]
        if layout.digests:
            digests = EMPTY | digests
        return OpenedEnvironment(env, databases, read_position(txn, databases), digests, "")


def _created(
    path: Path, log_id: UUID, map_size: int, reason: str, layout: Layout
) -> OpenedEnvironment:
    env = _open(path, map_size, layout)
    digests = EMPTY if layout.digests else {}
    with write_transaction(env) as txn:
        databases = {name: env.open_db(name.encode(), txn) for name in layout.names}
        write_identity(txn, databases, log_id, 0, digests)
    _sync_names(path)
    return OpenedEnvironment(env, databases, 0, digests, reason)


def _remove(path: Path) -> None:
    """Delete the environment's own two files durably, and nothing else."""
    (path / DATA).unlink()
    (path / LOCK).unlink(missing_ok=True)
    _sync_names(path)


def _sync_names(path: Path) -> None:
    """Make the file's name durable: LMDB syncs only its contents."""
    for directory in (path, path.parent):
        RealFileSystem().sync_directory(str(directory))
