"""The state tables in LMDB, under overlays in memory: the broker's `Tables`.

    put, delete ─► recent overlay
    freeze(P)      recent overlay ─► frozen overlay
    commit         frozen overlay ─► LMDB, which then stands for position P
    release        frozen overlay is dropped
    get, range     read recent, then frozen, then LMDB

LMDB is a cache of snapshot and log. It is written only up to positions that are durable
in the log, so it never leads the log. Start-up applies the missing part of the log
again. The reactor thread makes all calls except those that block: `commit`,
`FrozenOverlays.clear` and `dump` may run in other threads, one `commit` at a time.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from time import sleep
from typing import TYPE_CHECKING, Self, TypeVar

import msgpack

from txmq.errors import StoreError
from txmq.store.index.digest import EMPTY, Digests, TableDigest, read_digests, table_rows
from txmq.store.index.environment import (
    STATE,
    Layout,
    OpenedEnvironment,
    open_environment,
    read_position,
    translate_errors,
    write_identity,
    write_position,
    write_transaction,
)
from txmq.store.index.lmdb_table import LmdbTable
from txmq.store.tables import META, NAMES, REREAD, SCANNED, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from uuid import UUID

    from lmdb import Transaction, _Database

    from txmq.store.index.lmdb_table import Overlay

T = TypeVar("T")
DumpRow = tuple[str, bytes, bytes]  # table, key, row as MessagePack

MAP_SIZE = 1 << 40  # bytes of address space; unused ones cost nothing
SORTED_AT_ONCE = 2048  # keys: about 1 ms under the interpreter lock
WRITTEN_AT_ONCE = 256  # rows: about 0.4 ms
LOADED_AT_ONCE = 200_000  # rows in one transaction while a snapshot is loaded


@dataclass(slots=True)
class FrozenOverlays:
    """The overlays of all tables as of `position`, on their way to disk."""

    position: int
    overlays: dict[str, Overlay]
    committed: bool = False

    @property
    def rows(self) -> int:
        return sum(len(overlay.rows) for overlay in self.overlays.values())

    def clear(self) -> None:
        """Free the memory, after `release`, in the index thread.

        Rows are freed in steps, so that the reactor does not wait.
        """
        for overlay in self.overlays.values():
            overlay.clear()


class LmdbTables:
    """All tables of one broker.

    `position` is the log position that LMDB stands for. `reason` says why the cache
    found at opening was discarded; empty if none was.
    """

    def __init__(self, path: Path, log_id: UUID, opened: OpenedEnvironment) -> None:
        self._path, self._log_id = path, log_id
        self._env, self._databases, self.position, self._digests, self.reason = opened
        self._txn = self._env.begin()
        self._tables = {
            name: LmdbTable(database, self._txn, ordered=name in SCANNED, reread=name in REREAD)
            for name, database in self._databases.items()
        }
        self._frozen: FrozenOverlays | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        log_id: UUID,
        map_size: int = MAP_SIZE,
        log_end: int | None = None,
        layout: Layout = STATE,
    ) -> Self:
        """Open the cache in the directory `path`, or create an empty one at position 0.

        A cache that is damaged, unfinished, of another log or beyond `log_end` is
        discarded and recreated. Raises UnsupportedFormat for another version,
        StoreError where the system fails.
        """
        opened = open_environment(path, log_id, map_size=map_size, log_end=log_end, layout=layout)
        return cls(path, log_id, opened)

    @property
    def rebuilt(self) -> bool:
        """True if a cache was found and discarded."""
        return bool(self.reason)

    def __getitem__(self, name: str) -> LmdbTable:
        return self._tables[name]

    @property
    def overlay_rows(self) -> int:
        """Rows put or deleted since the last freeze: those of the next commit."""
        return sum(table.recent_rows for table in self._tables.values())

    def freeze(self, position: int) -> FrozenOverlays | None:
        """Freeze everything up to the log position `position`, for `commit`.

        Returns None while another frozen part is on its way.
        """
        if position < self.position:
            raise StoreError(
                f"{self._path}: the index stands for {self.position},"
                f" it cannot go back to {position}"
            )
        if self._frozen is not None:
            return None
        self._frozen = FrozenOverlays(
            position, {name: table.freeze() for name, table in self._tables.items()}
        )
        return self._frozen

    def commit(self, frozen: FrozenOverlays, *, durable: int) -> None:
        """Write `frozen` in one transaction. Blocks: for the index thread.

        `durable` proves that the log is durable up to its position. After an error
        nothing is written, and the same call may be repeated.
        """
        if durable < frozen.position:
            raise StoreError(
                f"{self._path}: {frozen.position} would lead the log,"
                f" which is durable up to {durable}"
            )
        # The stale slot of a killed reader would keep LMDB from reusing pages.
        self._env.reader_check()
        digests = dict(self._digests)
        with write_transaction(self._env) as txn:
            for name, overlay in frozen.overlays.items():
                digest = _write(txn, self._databases[name], overlay.rows, digests.get(name))
                if digest is not None:
                    digests[name] = digest
            write_position(txn, self._databases, frozen.position, digests)
        self.position, self._digests = frozen.position, digests
        frozen.committed = True

    def release(self, frozen: FrozenOverlays) -> None:
        """Drop the frozen overlays, and read LMDB as of their commit.

        Then `frozen.clear` may run.
        """
        if frozen is not self._frozen or not frozen.committed:
            raise StoreError(f"{self._path}: {frozen.position} is not the commit under way")
        self._renew()
        for table in self._tables.values():
            table.release(self._txn)
        self._frozen = None

    @contextmanager
    def dump(self) -> Iterator[tuple[int, Iterator[DumpRow]]]:
        """Yield a position, and all rows as of it: the content of a snapshot.

        Rows come table by table in the order of keys. One transaction, in any thread,
        beside commits. During it LMDB's file grows, because LMDB reuses no pages.
        """
        with self._env.begin() as txn:
            yield read_position(txn, self._databases), self._dump_rows(txn)

    def load(self, position: int, rows: Iterable[DumpRow]) -> None:
        """Replace LMDB's rows by those of a snapshot, in the order of `dump`.

        For start-up, before any `put`. After an error or a kill the cache is
        unfinished, and the next `open` discards it.
        """
        if self._frozen is not None or self.overlay_rows:
            raise StoreError(f"{self._path}: a snapshot must be loaded before the first put")
        with write_transaction(self._env) as txn:
            for database in self._databases.values():
                txn.drop(database, delete=False)
        digests = dict(EMPTY)
        for part in _slices(rows, LOADED_AT_ONCE):
            with write_transaction(self._env) as txn:
                self._append(txn, part, digests)
        with write_transaction(self._env) as txn:
            write_identity(txn, self._databases, self._log_id, position, digests)
        self.position, self._digests = position, digests
        self._renew()
        for table in self._tables.values():
            table.use_transaction(self._txn)

    def close(self) -> None:
        """Close the environment. Rows in the overlays are in the log only."""
        self._txn.abort()
        self._env.close()

    def _renew(self) -> None:
        # One reader transaction from commit to commit: one per row would cost more than
        # the row. A reader that follows the commits holds back no pages.
        self._txn.abort()
        self._txn = self._env.begin()

    def _dump_rows(self, txn: Transaction[bytes]) -> Iterator[DumpRow]:
        found = read_digests(txn, self._databases[META])
        with translate_errors(self._path):
            for name in NAMES:
                digest = TableDigest()
                for rows in table_rows(txn, self._databases[name], name):
                    digest = digest.plus(rows)
                    for key, value in rows:
                        yield name, key, value
                if found is None or digest != found[1].get(name, TableDigest()):
                    raise StoreError(
                        f"{self._path}: table {name} is damaged: it has other rows than were"
                        " written",
                        hint="restart the broker: it makes the index anew from snapshot and log",
                    )

    def _append(self, txn: Transaction[bytes], rows: Sequence[DumpRow], digests: Digests) -> None:
        for name, group in groupby(rows, key=itemgetter(0)):
            if name not in self._databases:
                raise StoreError(f"{self._path}: the snapshot has an unknown table {name!r}")
            items = [(key, value) for _, key, value in group]
            _, added = txn.cursor(self._databases[name]).putmulti(items, append=True)
            if added != len(items):
                raise StoreError(f"{self._path}: the snapshot has rows of {name!r} out of order")
            digests[name] = digests[name].plus(items)


def _write(
    txn: Transaction[bytes],
    database: _Database,
    rows: dict[bytes, Row | None],
    digest: TableDigest | None,
) -> TableDigest | None:
    """Put and delete rows; return the table's digest with them, if it has one."""
    cursor = txn.cursor(database)
    pack = msgpack.Packer().pack
    for keys in _slices(_in_order(rows), WRITTEN_AT_ONCE):
        items = [(key, pack(row)) for key in keys if (row := rows[key]) is not None]
        if digest is not None:
            digest = digest.plus(cursor.getmulti(keys), sign=-1).plus(items)
        cursor.putmulti(items)
        for key in keys:
            if rows[key] is None:
                txn.delete(key, b"", database)
        sleep(0)  # yields to the reactor now, not after the interpreter's switch interval
    return digest


def _in_order(rows: Iterable[bytes]) -> Iterator[bytes]:
    """Return the keys in order, so that LMDB visits each page once.

    They are sorted in runs, because one large sort would hold the interpreter lock.
    """
    return merge(*(sorted(run) for run in _slices(rows, SORTED_AT_ONCE)))


def _slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
