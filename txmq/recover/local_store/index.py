"""The index of a local store: its tables in LMDB, which can be made again from the log.

    <store>/index/data.mdb  lock.mdb
    <store>/index/seal      the hash of data.mdb, while nobody has the store open

LMDB survives kills and power cuts, but has no checksums. The seal is written when the
store is closed, and shows whether the file is still what was closed.
"""

from __future__ import annotations

import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from xxhash import xxh3_128

from txmq.errors import StoreError
from txmq.recover.local_store.files import read_file, write_file
from txmq.recover.local_store.state import NAMES
from txmq.store.filesystem import RealFileSystem
from txmq.store.index.digest import DATA
from txmq.store.index.environment import Layout, has_environment, remove_environment
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.log.decoder import CHUNK

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.store.filesystem import FileSystem
    from txmq.store.index.lmdb_tables import FrozenOverlays
    from txmq.store.tables import Table

SEAL = "seal"
LAYOUT = Layout(NAMES, digests=False)
MAP_SIZE = 1 << 36  # bytes of address space; a process may have many stores


class Index(Protocol):
    """Tables that stand for a position of the log, as `LmdbTables` has them."""

    position: int

    def __getitem__(self, name: str) -> Table: ...

    @property
    def overlay_rows(self) -> int: ...

    def freeze(self, position: int) -> FrozenOverlays | None: ...

    def commit(self, frozen: FrozenOverlays, *, durable: int) -> None: ...

    def release(self, frozen: FrozenOverlays) -> None: ...

    def close(self) -> None: ...


class OpenIndex(Protocol):
    """Opening of a store's index; `discard`: why the one that is there is no good."""

    def __call__(self, store_id: UUID, *, discard: str) -> tuple[Index, str]:
        """Return the index, and why it was made anew (empty if it was not)."""

    def seal(self) -> None:
        """Note that the index was closed as it should be."""

    def discard(self) -> None:
        """Remove the index, which was closed."""


class LmdbIndex:
    """The index of the store in a directory."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / "index"
        self._fs = RealFileSystem()

    def __call__(self, store_id: UUID, *, discard: str) -> tuple[Index, str]:
        reason = discard or self._broken_seal()
        if reason:
            remove_environment(self._path)
        self._remove_seal()
        tables = LmdbTables.open(self._path, log_id=store_id, map_size=MAP_SIZE, layout=LAYOUT)
        return tables, reason or tables.reason

    def seal(self) -> None:
        with suppress(StoreError):  # without it nothing is lost
            write_file(self._fs, str(self._path), SEAL, self._hash())

    def discard(self) -> None:
        remove_environment(self._path)

    def _broken_seal(self) -> str:
        names = self._fs.listdir(str(self._path))
        if SEAL not in names or not has_environment(self._path):
            return ""
        same = read_file(self._fs, f"{self._path}/{SEAL}") == self._hash()
        return "" if same else "it is not as it was when the store was closed"

    def _remove_seal(self) -> None:
        if SEAL in self._fs.listdir(str(self._path)):
            self._fs.remove(f"{self._path}/{SEAL}")
            self._fs.sync_directory(str(self._path))

    def _hash(self) -> bytes:
        return _hash(self._fs, self._path)


def copy_sealed(index: Path, to: Path) -> None:
    """Copy an index that nobody has open; if it is not sealed, do nothing."""
    with suppress(OSError, StoreError):
        fs = RealFileSystem()
        seal = read_file(fs, f"{index}/{SEAL}")
        to.mkdir()
        shutil.copyfile(index / DATA, to / DATA)
        if _hash(fs, to) != seal:
            (to / DATA).unlink()


def _hash(fs: FileSystem, index: Path) -> bytes:
    hashed = xxh3_128()
    with closing(fs.open(f"{index}/{DATA}")) as file:
        for offset in range(0, file.size(), CHUNK):
            hashed.update(file.pread(CHUNK, offset))
    return hashed.hexdigest().encode() + b"\n"
