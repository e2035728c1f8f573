"""Letters that replay plans have put back, and that have not ended or failed since.

Their rows in table `moved` are still those of dead letters: the cursor of their plan
says that they are retries (docs/decisions/0101). So a plan puts back thousands of
letters and writes no row of any of them. What waits for a consumer is in a queue for
each partition, which follows from the tables: a start makes it anew.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIMMED_AT = 4_096  # offsets at the front that are no longer in the queue


class PutBackQueue:
    """The offsets of a partition that wait, in the order of their return."""

    __slots__ = ("_first", "_gone", "_offsets")

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._first = 0
        self._gone: set[int] = set()  # behind the first one, and not in the queue any more

    def add(self, offset: int) -> None:
        """Add an offset at the end. It may have been in the queue before."""
        if offset in self._gone:  # its former place is to stay empty
            self._offsets, self._first = array("Q", self), 0
            self._gone.clear()
        self._offsets.append(offset)

    def discard(self, offset: int) -> None:
        """Take out an offset, which is there."""
        self._gone.add(offset)
        offsets, gone, first = self._offsets, self._gone, self._first
        while first < len(offsets) and offsets[first] in gone:
            gone.remove(offsets[first])
            first += 1
        if first >= TRIMMED_AT and 2 * first >= len(offsets):
            del offsets[:first]
            first = 0
        self._first = first

    def __len__(self) -> int:
        return len(self._offsets) - self._first - len(self._gone)

    def __iter__(self) -> Iterator[int]:
        """Yield the offsets in order. The queue must not change meanwhile."""
        gone = self._gone
        for at in range(self._first, len(self._offsets)):
            if (offset := self._offsets[at]) not in gone:
                yield offset
