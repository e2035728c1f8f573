"""The state tables in LMDB, under an overlay in memory: the broker's `Tables`.

    put, delete ─► recent overlay ── freeze(P) ─► frozen overlay ── commit ─► LMDB, standing for P ── release
    get, range  ─► recent, then frozen, then LMDB

LMDB is a cache of snapshot and log. It is written only up to positions that are durable
in the log, so it lags the log and never leads it; what it lacks is applied again from
the log at start-up. Everything is called by the reactor thread, except what blocks:
`commit`, `Frozen.clear` and `dump` may run in other threads, one `commit` at a time.
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
from txmq.store.environment import (
    RESERVED,
    Opened,
    open_environment,
    read_position,
    translated,
    write_identity,
    write_position,
    writing,
)
from txmq.store.lmdb_table import LmdbTable
from txmq.store.tables import META, NAMES, RANGED, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from uuid import UUID

    from lmdb import Transaction, _Database

    from txmq.store.overlay import Overlay

T = TypeVar("T")
DumpRow = tuple[str, bytes, bytes]  # table, key, row as MessagePack

MAP_SIZE = 1 << 40  # bytes of address space, which cost nothing until they are used
SORTED_AT_ONCE = 2048  # keys: about 1 ms in which no other thread runs
WRITTEN_AT_ONCE = 256  # rows: about 0.3 ms
LOADED_AT_ONCE = 200_000  # rows in one transaction while a snapshot is loaded


@dataclass(slots=True)
class Frozen:
    """The overlays of all tables as they stood at `position`, on their way to disk."""

    position: int
    overlays: dict[str, Overlay]
    committed: bool = False

    @property
    def rows(self) -> int:
        return sum(len(overlay.rows) for overlay in self.overlays.values())

    def clear(self) -> None:
        """Free the memory, after `release`, in the index thread: piece by piece, so
        that the reactor is not held up.
        """
        for overlay in self.overlays.values():
            overlay.clear()


class LmdbTables:
    """All tables of one broker.

    `position` is the log position that LMDB stands for. `reason` says why the cache
    found at opening was thrown away, empty if none was.
    """

    def __init__(self, path: Path, log_id: UUID, opened: Opened) -> None:
        self._path, self._log_id = path, log_id
        self._env, self._databases, self.position, self.reason = opened
        self._txn = self._env.begin()
        self._tables = {
            name: LmdbTable(database, self._txn, ranged=name in RANGED)
            for name, database in self._databases.items()
        }
        self._frozen: Frozen | None = None

    @classmethod
    def open(
        cls, path: Path, *, log_id: UUID, map_size: int = MAP_SIZE, log_end: int | None = None
    ) -> Self:
        """Open the cache in the directory `path`, or make an empty one, of position 0.

        One that is damaged, was never finished, belongs to another log or stands for
        more than `log_end` is discarded and made anew. Raises UnsupportedFormat for
        another version's, StoreError where the system refuses.
        """
        return cls(path, log_id, open_environment(path, log_id, map_size=map_size, log_end=log_end))

    @property
    def rebuilt(self) -> bool:
        """Whether a cache was found and discarded."""
        return bool(self.reason)

    def __getitem__(self, name: str) -> LmdbTable:
        return self._tables[name]

    @property
    def overlay_rows(self) -> int:
        """Rows put or deleted since the last freeze: what the next commit will
        write.
        """
        return sum(table.recent_rows for table in self._tables.values())

    def freeze(self, position: int) -> Frozen | None:
        """Set aside for `commit` everything up to the log position `position`. None
        while another is on its way.
        """
        if position < self.position:
            raise StoreError(
                f"{self._path}: stands for {self.position}, cannot go back to {position}"
            )
        if self._frozen is not None:
            return None
        self._frozen = Frozen(
            position, {name: table.freeze() for name, table in self._tables.items()}
        )
        return self._frozen

    def commit(self, frozen: Frozen, *, durable: int) -> None:
        """Write `frozen` in one transaction. Blocks: for the index thread.

        The log must be durable up to its position, as `durable` has to prove. After an
        error nothing was written, and the same call may be made again.
        """
        if durable < frozen.position:
            raise StoreError(
                f"{self._path}: {frozen.position} would lead the log, which is durable up to {durable}"
            )
        # a reader that was killed would keep all pages from being used again
        self._env.reader_check()
        with writing(self._env) as txn:
            for name, overlay in frozen.overlays.items():
                _write(txn, self._databases[name], overlay.rows)
            write_position(txn, self._databases, frozen.position)
        self.position = frozen.position
        frozen.committed = True

    def release(self, frozen: Frozen) -> None:
        """Forget the frozen layer: from now on LMDB is read as of its commit. Now
        `frozen.clear` may run.
        """
        if frozen is not self._frozen or not frozen.committed:
            raise StoreError(f"{self._path}: {frozen.position} is not the commit that is under way")
        self._renew()
        for table in self._tables.values():
            table.release(self._txn)
        self._frozen = None

    @contextmanager
    def dump(self) -> Iterator[tuple[int, Iterator[DumpRow]]]:
        """A position, and all rows as of it, table by table in the order of keys: what
        a snapshot is made of.

        One transaction, in any thread, beside commits. While it lasts LMDB's file grows
        instead of using pages again.
        """
        with self._env.begin() as txn:
            yield read_position(txn, self._databases), self._dump_rows(txn)

    def load(self, position: int, rows: Iterable[DumpRow]) -> None:
        """Replace what LMDB holds by the rows of a snapshot, in the order of `dump`.
        For start-up, before any `put`.

        After an error, or if killed half-way, the cache is of no use, and the next
        `open` discards it.
        """
        if self._frozen is not None or self.overlay_rows:
            raise StoreError(f"{self._path}: a snapshot can only be loaded before anything is put")
        with writing(self._env) as txn:
            for database in self._databases.values():
                txn.drop(database, delete=False)
        for part in _slices(rows, LOADED_AT_ONCE):
            with writing(self._env) as txn:
                self._append(txn, part)
        with writing(self._env) as txn:
            write_identity(txn, self._databases, self._log_id, position)
        self.position = position
        self._renew()
        for table in self._tables.values():
            table.read_with(self._txn)

    def close(self) -> None:
        """Close the environment. What is in the overlays stays in the log only."""
        self._txn.abort()
        self._env.close()

    def _renew(self) -> None:
        # One reader, kept from commit to commit: one for each row would cost more than
        # the row, and a reader that keeps up with the commits holds back no page.
        self._txn.abort()
        self._txn = self._env.begin()

    def _dump_rows(self, txn: Transaction[bytes]) -> Iterator[DumpRow]:
        with translated(self._path):
            for name in NAMES:
                for key, value in txn.cursor(self._databases[name]):
                    if name != META or key not in RESERVED:
                        yield name, key, value

    def _append(self, txn: Transaction[bytes], rows: Sequence[DumpRow]) -> None:
        for name, group in groupby(rows, key=itemgetter(0)):
            if name not in self._databases:
                raise StoreError(f"{self._path}: the snapshot has an unknown table {name!r}")
            items = [(key, value) for _, key, value in group]
            _, added = txn.cursor(self._databases[name]).putmulti(items, append=True)
            if added != len(items):
                raise StoreError(f"{self._path}: the snapshot has rows of {name!r} out of order")


def _write(txn: Transaction[bytes], database: _Database, rows: dict[bytes, Row | None]) -> None:
    cursor = txn.cursor(database)
    pack = msgpack.Packer().pack
    for keys in _slices(_in_order(rows), WRITTEN_AT_ONCE):
        cursor.putmulti([(key, pack(row)) for key in keys if (row := rows[key]) is not None])
        for key in keys:
            if rows[key] is None:
                txn.delete(key, b"", database)
        sleep(0)  # gives the interpreter to the reactor now instead of after its switch interval


def _in_order(rows: Iterable[bytes]) -> Iterator[bytes]:
    """Keys in order: LMDB then visits each page once. Sorted in runs, as one big sort
    would hold up the reactor.
    """
    return merge(*(sorted(run) for run in _slices(rows, SORTED_AT_ONCE)))


def _slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
