"""A broker with the real LMDB and a simulated disk that loses power: every commit of
LMDB is repeated on that disk.

LMDB writes its file itself, in C, so no simulated file system can hold it. It works in
a real directory here. `Mirror` repeats each of its commits on the simulated disk, in
the order that LMDB guarantees: the pages, an fdatasync, and then the page that names
them, which the next commit syncs (`metasync=False`; without `sync` there is no
fdatasync either). So the power may fail, and tear unsynced pages, in the middle of a
commit as anywhere else. The remaining file is written back to the real directory, and
LMDB has to open it.

A process that is killed leaves the same files without loss. A test with a process shows
that its locks and readers die with it (`tests/store/index/test_lmdb_tables.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

from lmdb import Environment

from tests.broker.data_directory.retention_world import ARCHIVE, RetentionWorld
from tests.broker.support import BEGAN
from tests.simulation.simulated_broker import dump_tables
from tests.store.simdisk import apply
from tests.store.simfs import SimFS
from txmq.broker.data_directory.storage import RecordSource, open_directory, roll_forward
from txmq.config.broker import BrokerSettings
from txmq.core import machine
from txmq.core.state.state import State
from txmq.store.filesystem import RealFileSystem
from txmq.store.index import digest, environment
from txmq.store.index.digest import DATA
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.log.log import Log
from txmq.store.tables import META, MemoryTables

SEGMENT, PREALLOCATE = 64 << 10, 8 << 10
SNAPSHOT = 6 << 10  # bytes of log between two
METAS = 2  # pages at the beginning that name the others, in turns
STORAGE = {"segment_bytes": SEGMENT, "preallocate_bytes": PREALLOCATE, "snapshot_bytes": SNAPSHOT}
Rows = list[tuple[str, bytes, bytes]]


class Indexed(RetentionWorld):
    """One life of a broker whose tables are in LMDB, in a real directory; everything
    else is on the simulated disk.
    """

    def __init__(self, fs: SimFS, data: Path, *, now: int = BEGAN) -> None:
        super().__init__(fs, now=now, data=str(data), policy="archive")

    def broker_settings(self) -> dict[str, Any]:
        return STORAGE

    def opened(self, now: int) -> tuple[Log, State, LmdbTables]:
        found = open_directory(self.fs, self.own, now)
        return found.log, found.state, found.tables

    def tend(self) -> None:
        """Run the storage service until everything is on disk."""
        for _ in range(12):
            self.storage.tick()
            self.turn()

    def close(self) -> None:
        self.storage.close()
        self.log.close()

    def die(self) -> None:
        """Lose everything in memory."""
        self.tables.close()
        self.log.close()


def settings_of(data: Path) -> BrokerSettings:
    return BrokerSettings(data=data).model_copy(update=STORAGE)


def new_disk(data: Path) -> SimFS:
    fs = SimFS()
    fs.makedirs(str(data))
    fs.makedirs(ARCHIVE)
    return fs.copy()


def folded(log: RecordSource) -> Rows:
    """Return the tables that the log alone makes."""
    state = machine.load(MemoryTables())
    roll_forward(state, log, 0)
    return rows_of(state)


def rows_of(state: State) -> Rows:
    """Return all rows, without LMDB's own."""
    return [row for row in dump_tables(state) if row[0] != META or row[1] not in digest.RESERVED]


def stored(data: Path, log_id: UUID) -> tuple[int, Rows]:
    """Return the position of LMDB on the disk, and its rows by table."""
    with (
        closing(LmdbTables.open(data / "index", log_id=log_id)) as tables,
        tables.dump() as (position, rows),
    ):
        return position, list(rows)


class Mirror:
    """LMDB's file in `data`, on the simulated disk."""

    def __init__(self, fs: SimFS, data: Path) -> None:
        self._fs, self._data = fs, data
        self._folder = f"{data}/index"
        self._path = f"{self._folder}/{DATA}"
        self._envs: list[Environment] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mirror all changes of the environment meanwhile. Closes what the power cut
        left open.
        """
        with (
            patch.object(environment, "_open", self._following(environment._open)),
            patch.object(environment, "_extend_file", self._repeating(environment._extend_file)),
            patch.object(environment, "_remove", self._removing(environment._remove)),
            patch.object(
                RealFileSystem, "sync_directory", lambda _real, path: self._fs.sync_directory(path)
            ),
        ):
            try:
                yield
            finally:
                for env in self._envs:
                    env.close()

    def _following(self, real: Any) -> Any:
        def opened(path: Path, *args: Any) -> Environment:
            env: Environment = real(path, *args)
            self._envs.append(env)
            self._fs.makedirs(self._folder)
            if DATA not in self._fs.listdir(self._folder):
                self._fs.create(self._path).pwrite([(path / DATA).read_bytes()], 0)
            return env

        return opened

    def _repeating(self, real: Any) -> Any:
        def committed(env: Environment) -> None:
            flags, metas = env.flags(), METAS * env.stat()["psize"]
            assert not flags["writemap"], "it would write in another order"
            real(env)
            now = (self._data / "index" / DATA).read_bytes()
            with closing(self._fs.open(self._path, write=True)) as file:
                before = file.pread(len(now), 0)
                changed = [
                    at
                    for at in range(metas, len(now), 512)
                    if now[at : at + 512] != before[at : at + 512]
                ]
                if changed:
                    file.pwrite([now[changed[0] : changed[-1] + 512]], changed[0])
                if flags["sync"]:
                    file.fdatasync()
                file.pwrite([now[:metas]], 0)
                file.truncate(len(now))

        return committed

    def _removing(self, real: Any) -> Any:
        def removed(path: Path) -> None:
            self._fs.remove(self._path)
            real(path)

        return removed


def each_write_lost(fs: SimFS, data: Path) -> Iterator[SimFS]:
    """Return the disks that a power cut may leave, each without one unsynced write to
    LMDB's file.
    """
    path = f"{data}/index/{DATA}"
    inode = fs._inode(path, "open")
    for lost in range(len(inode.changes)):
        content = bytearray(inode.durable)
        for change in (*inode.changes[:lost], *inode.changes[lost + 1 :]):
            apply(content, change)
        left = fs.copy()
        left.remove(path)
        with closing(left.create(path)) as file:
            file.pwrite([bytes(content)], 0)
        yield left


def written_back(fs: SimFS, data: Path) -> None:
    """Write LMDB's files of the simulated disk into the real directory."""
    index = data / "index"
    shutil.rmtree(index, ignore_errors=True)
    folder = str(index)
    if DATA in fs.listdir(folder):
        index.mkdir(parents=True)
        path = f"{folder}/{DATA}"
        with closing(fs.open(path)) as file:
            (index / DATA).write_bytes(file.pread(file.size(), 0))
