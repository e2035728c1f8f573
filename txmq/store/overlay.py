"""What a table was given since it was last written to disk: a layer in memory that
hides the rows below it.
"""

from __future__ import annotations

from operator import gt, lt
from typing import TYPE_CHECKING

from sortedcontainers import SortedList

from txmq.store.tables import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

Item = tuple[bytes, Row | None]  # None: deleted in this layer

ORDERED_AT_ONCE = 1024  # keys: about 2 ms in which nothing else runs


class Overlay:
    """Rows by key, None for those that were deleted.

    Once frozen it is never given another row, so that the index thread may read `rows`
    while the reactor goes on looking things up in it.
    """

    __slots__ = ("_fresh", "_keys", "ranged", "rows")

    def __init__(self, *, ranged: bool = False) -> None:
        self.rows: dict[bytes, Row | None] = {}
        # Keeping keys in order costs more than all the rest, and most tables are never
        # asked for a range. Once one was, the keys are put in order soon after they
        # come, so that no later range has to wait for very many of them.
        self.ranged = ranged
        self._fresh: list[bytes] = []
        self._keys: SortedList[bytes] = SortedList()

    def put(self, key: bytes, row: Row | None) -> None:
        """Set the row of `key`, or delete it."""
        if key not in self.rows:
            self._fresh.append(key)
            if self.ranged and len(self._fresh) >= ORDERED_AT_ONCE:
                self._order()
        self.rows[key] = row

    def range(self, start: bytes, stop: bytes | None, *, reverse: bool) -> Iterator[Item]:
        """As `Table.range`, with the deleted keys among them."""
        self.ranged = True
        if self._fresh:
            self._order()
        rows = self.rows
        for key in self._keys.irange(start, stop, inclusive=(True, False), reverse=reverse):
            yield key, rows[key]

    def clear(self) -> None:
        """Free everything, row by row: to drop a big dict at once would hold the
        interpreter for its whole length.
        """
        self._fresh, self._keys = [], SortedList()
        while self.rows:
            self.rows.popitem()

    def _order(self) -> None:
        self._keys.update(self._fresh)
        self._fresh.clear()


def overlaid(upper: Iterator[Item], lower: Iterator[Item], *, reverse: bool) -> Iterator[Item]:
    """Two layers as one, both in order; where both have a key, the upper one's row."""
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
