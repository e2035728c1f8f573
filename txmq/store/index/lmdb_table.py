"""One table of the state in LMDB, below overlays in memory.

An overlay holds the rows that were put since a commit: the recent overlay takes new
rows, the frozen one is on its way to LMDB.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from heapq import merge
from operator import gt, lt
from typing import TYPE_CHECKING

import lmdb
import msgpack
from sortedcontainers import SortedList

from txmq.store.tables import IndexDamaged, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmdb import Transaction, _Database

_unpack = partial(msgpack.unpackb, use_list=False, strict_map_key=False)


Item = tuple[bytes, Row | None]  # None: deleted in this layer

# what reads of a damaged page, or of a damaged row, raise
DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    ValueError,
)

KEPT_ROWS = 2_048  # of one table, that were read since a commit
ORDERED_AT_ONCE = 1024  # keys: about 0.2 ms in which nothing else runs
MERGED_AT_ONCE = 1 << 16  # keys of two sorted parts: about 2 ms


class Overlay:
    """Rows by key, None for deleted ones.

    A frozen overlay gets no more rows, so that the index thread may read `rows` while
    the reactor looks rows up.
    """

    __slots__ = ("_keys", "_runs", "_unordered", "ordered", "rows")

    def __init__(self, *, ordered: bool = False) -> None:
        self.rows: dict[bytes, Row | None] = {}
        # Ordering the keys costs more than everything else here, and most tables are
        # never scanned by range. After the first range, keys are ordered soon after
        # they arrive, so that no later range has to order very many of them.
        self.ordered = ordered
        self._unordered: list[bytes] = []
        self._keys: SortedList[bytes] = SortedList()
        # Where thousands arrive between two ranges: sorted parts, each at least twice
        # as long as the next. To add them to the keys one by one costs more.
        self._runs: list[list[bytes]] = []

    def put(self, key: bytes, row: Row | None) -> None:
        """Set the row of `key`, or delete it."""
        if key not in self.rows:
            self._unordered.append(key)
            if self.ordered and len(self._unordered) >= ORDERED_AT_ONCE:
                self._add_run()
        self.rows[key] = row

    def range(self, start: bytes, stop: bytes | None, *, reverse: bool) -> Iterator[Item]:
        """Yield rows as `Table.range` does, with deleted keys among them."""
        self.ordered = True
        if self._unordered:
            self._keys.update(self._unordered)
            self._unordered.clear()
        rows = self.rows
        keys = self._keys.irange(start, stop, inclusive=(True, False), reverse=reverse)
        if self._runs:
            parts = [_part(run, start, stop, reverse=reverse) for run in self._runs]
            keys = merge(keys, *parts, reverse=reverse)
        for key in keys:
            yield key, rows[key]

    def clear(self) -> None:
        """Free everything, row by row.

        Dropping a large dict at once would hold the interpreter lock all the while.
        """
        self._unordered, self._keys, self._runs = [], SortedList(), []
        while self.rows:
            self.rows.popitem()

    def _add_run(self) -> None:
        run, runs = sorted(self._unordered), self._runs
        self._unordered.clear()
        while runs and len(runs[-1]) < 2 * len(run) <= MERGED_AT_ONCE:
            run += runs.pop()
            run.sort()
        runs.append(run)


def _part(run: list[bytes], start: bytes, stop: bytes | None, *, reverse: bool) -> Iterator[bytes]:
    """Return the keys of a sorted part with start <= key < stop."""
    low = bisect_left(run, start)
    high = len(run) if stop is None else bisect_left(run, stop)
    return map(run.__getitem__, range(high - 1, low - 1, -1) if reverse else range(low, high))


def merge_layers(upper: Iterator[Item], lower: Iterator[Item], *, reverse: bool) -> Iterator[Item]:
    """Yield the items of two ordered layers as one; the upper layer wins."""
    before = gt if reverse else lt
    below = next(lower, None)
    for item in upper:
        key = item[0]
        while below is not None and before(below[0], key):
            yield below
            below = next(lower, None)
        if below is not None and below[0] == key:
            below = next(lower, None)
        yield item
    if below is not None:
        yield below
        yield from lower


class LmdbTable:
    """A `Table` in LMDB. Keys are 1 to 511 bytes, which is LMDB's limit.

    A row that was read back from disk is a plain tuple, and its lists are tuples.
    """

    __slots__ = ("_database", "_frozen", "_read", "_recent", "_stored", "_txn")

    def __init__(
        self,
        database: _Database,
        txn: Transaction[bytes],
        *,
        ordered: bool = False,
        reread: bool = False,
    ) -> None:
        """Create the table; `ordered` keeps its keys in order from the start, `reread`
        keeps the rows that were read since the last commit, up to a number.
        """
        # rows of the transaction
        self._read: dict[bytes, Row | None] | None = {} if reread else None
        self._database = database
        self._recent = Overlay(ordered=ordered)
        self._frozen = Overlay()
        self.use_transaction(txn)

    def get(self, key: bytes) -> Row | None:
        rows = self._recent.rows
        row = rows.get(key)
        if row is not None or key in rows:
            return row
        rows = self._frozen.rows
        row = rows.get(key)
        if row is not None or key in rows or not self._stored:
            return row
        return self._get_stored(key) if self._read is None else self._get_read(self._read, key)

    def _get_stored(self, key: bytes) -> Row | None:
        try:
            value = self._txn.get(key, None, self._database)
            return None if value is None else _unpack(value)
        except DAMAGE as error:
            raise IndexDamaged.because(error) from error

    def _get_read(self, read: dict[bytes, Row | None], key: bytes) -> Row | None:
        row = read.get(key)
        if row is None:
            if len(read) >= KEPT_ROWS:
                read.clear()
            row = read[key] = self._get_stored(key)
        return row

    def put(self, key: bytes, row: Row) -> None:
        self._recent.put(key, row)

    def delete(self, key: bytes) -> None:
        self._recent.put(key, None)

    def range(
        self, start: bytes, stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Row]]:
        """Yield rows as `Table.range` does.

        Each row deleted since the last commit costs a step. Iterate within one reactor
        turn: the next `release` ends the transaction of the iterator.
        """
        items: Iterator[Item] = self._range_stored(start, stop, reverse=reverse)
        for layer in (self._frozen, self._recent):
            if layer.rows:
                items = merge_layers(
                    layer.range(start, stop, reverse=reverse), items, reverse=reverse
                )
        return ((key, row) for key, row in items if row is not None)

    def freeze(self) -> Overlay:
        """Freeze and return the recent overlay; start a new one above it."""
        self._frozen, self._recent = self._recent, Overlay(ordered=self._recent.ordered)
        return self._frozen

    def release(self, txn: Transaction[bytes]) -> None:
        """Drop the frozen overlay, whose rows `txn` sees."""
        self.use_transaction(txn)
        self._frozen = Overlay()

    def use_transaction(self, txn: Transaction[bytes]) -> None:
        """Read with `txn` from now on."""
        self._txn = txn
        if self._read:
            self._read.clear()
        self._stored = txn.stat(self._database)["entries"] > 0

    @property
    def recent_rows(self) -> int:
        return len(self._recent.rows)

    def _range_stored(self, start: bytes, stop: bytes | None, *, reverse: bool) -> Iterator[Item]:
        if not self._stored:
            return
        try:
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
        except DAMAGE as error:
            raise IndexDamaged.because(error) from error
