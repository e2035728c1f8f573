"""One state table: a recent overlay over a frozen one over LMDB."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgpack

from txmq.store.overlay import Item, Overlay, overlaid
from txmq.store.tables import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmdb import Transaction, _Database

_unpack = partial(msgpack.unpackb, use_list=False, strict_map_key=False)


class LmdbTable:
    """A `Table`. Keys are 1 to 511 bytes, which is LMDB's limit.

    A row that was read back from disk is a plain tuple, and its lists have become
    tuples.
    """

    __slots__ = ("_database", "_frozen", "_recent", "_stored", "_txn")

    def __init__(
        self, database: _Database, txn: Transaction[bytes], *, ranged: bool = False
    ) -> None:
        """`ranged`: keep it ready to be asked for ranges, before it ever was."""
        self._database = database
        self._recent = Overlay(ranged=ranged)
        self._frozen = Overlay()
        self.read_with(txn)

    def get(self, key: bytes) -> Row | None:
        rows = self._recent.rows
        row = rows.get(key)
        if row is not None or key in rows:
            return row
        rows = self._frozen.rows
        row = rows.get(key)
        if row is not None or key in rows or not self._stored:
            return row
        value = self._txn.get(key, None, self._database)
        return None if value is None else _unpack(value)

    def put(self, key: bytes, row: Row) -> None:
        self._recent.put(key, row)

    def delete(self, key: bytes) -> None:
        self._recent.put(key, None)

    def range(
        self, start: bytes, stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Row]]:
        """As `Table.range`. Rows deleted since the last commit are stepped over one by
        one.

        Iterate within one turn of the reactor: the next `release` ends the transaction
        that it reads with.
        """
        items: Iterator[Item] = self._range_stored(start, stop, reverse=reverse)
        for layer in (self._frozen, self._recent):
            if layer.rows:
                items = overlaid(layer.range(start, stop, reverse=reverse), items, reverse=reverse)
        return ((key, row) for key, row in items if row is not None)

    def freeze(self) -> Overlay:
        """Start a new overlay on top of the recent one, and return that."""
        self._frozen, self._recent = self._recent, Overlay(ranged=self._recent.ranged)
        return self._frozen

    def release(self, txn: Transaction[bytes]) -> None:
        """Forget the frozen overlay: `txn` sees its rows."""
        self.read_with(txn)
        self._frozen = Overlay()

    def read_with(self, txn: Transaction[bytes]) -> None:
        """Read with `txn` from now on."""
        self._txn = txn
        self._stored = txn.stat(self._database)["entries"] > 0

    @property
    def recent_rows(self) -> int:
        return len(self._recent.rows)

    def _range_stored(self, start: bytes, stop: bytes | None, *, reverse: bool) -> Iterator[Item]:
        if not self._stored:
            return
        cursor = self._txn.cursor(self._database)
        if reverse:
            if not (
                cursor.prev() if stop is not None and cursor.set_range(stop) else cursor.last()
            ):
                return
            for key, value in cursor.iterprev():
                if key < start:
                    return
                yield key, _unpack(value)
        elif cursor.set_range(start):
            for key, value in cursor:
                if stop is not None and key >= stop:
                    return
                yield key, _unpack(value)
