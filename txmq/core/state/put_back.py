"""Letters that replay plans have put back, and that have not ended or failed since.

Their rows in table `failed` are still those of dead letters: the cursor of their plan
says that they are retries (docs/decisions/0093). So a plan puts back thousands of
letters and writes no row of any of them. What waits for a consumer is in a queue for
each partition, which follows from the tables: a start makes it anew.

The queue knows of a letter what its delivery and its ack need, so that neither reads
rows where neighbours go out together.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIMMED_AT = 4_096  # places at the front that are no longer in the queue
NEAR = 10_000  # places from the front among which neighbours are looked for


NO_KEY = -(1 << 63)  # in the column of key hashes


class PlainLetter(NamedTuple):
    """Letter as its ack has to know it: its plan, the hash of its error, the time
    slot of its death and, in an ordered group, the hash of its key.
    """

    plan: int
    error: int
    slot: int
    key_hash: int | None = None


class WaitingLetters(NamedTuple):
    """Letters that wait side by side. `end` is that of the record in the log that has
    put them back, or of a later one; `keys` are their hashes in an ordered group.
    """

    end: int
    keys: tuple[int | None, ...] = ()


class Neighbours(NamedTuple):
    """Letters that wait side by side, of one batch, when they were put back."""

    start: int
    letters: int
    position: int


class PutBackQueue:
    """The offsets of a partition that wait, in the order of their return."""

    __slots__ = (
        "_errors", "_first", "_gone", "_keys", "_offsets", "_plans", "_positions", "_records",
        "_slots",
    )  # fmt: skip

    def __init__(self, *, keyed: bool = False) -> None:
        """`keyed`: the hashes of keys are kept, too."""
        self._keys: array[int] | None = array("q") if keyed else None
        self._offsets, self._positions, self._errors = array("Q"), array("Q"), array("Q")
        self._plans, self._slots = array("I"), array("I")
        self._first = 0
        self._gone: set[int] = set()  # behind the first one, and not in the queue any more
        # records that have put letters back: the end of each in the log, and the place
        # behind its last letter
        self._records: deque[tuple[int, int]] = deque()

    def add(self, offset: int, position: int = 0, letter: PlainLetter | None = None) -> None:
        """Add an offset at the end, with the position of its batch; it may have been
        here before. No `letter`: its ack has to read its row.
        """
        if offset in self._gone:  # its former place is to stay empty
            self._gone.remove(offset)
            at = self._offsets.index(offset, self._first)
            for column in self._columns:
                del column[at]
            self._join_records()
        plan, error, slot, key_hash = letter or (0, 0, 0, None)
        self._offsets.append(offset)
        self._positions.append(position)
        self._plans.append(plan)
        self._errors.append(error)
        self._slots.append(slot)
        if self._keys is not None:
            self._keys.append(NO_KEY if key_hash is None else key_hash)

    def end_record(self, end: int) -> None:
        """Note that what was added last came with a record that ends there in the
        log.
        """
        self._records.append((end, len(self._offsets)))

    def waiting_at(self, start: int, count: int) -> WaitingLetters | None:
        """Return what is known of these neighbours; None = they do not wait side by
        side near the front.
        """
        at = self._find(start, count)
        if at is None or (self._keys is not None and 0 in self._plans[at : at + count]):
            return None  # the key of one is in its row only
        while len(self._records) > 1 and self._records[0][1] <= self._first:
            self._records.popleft()
        end = next((end for end, behind in self._records if at + count <= behind), 0)
        return WaitingLetters(end, self._keys_at(at, count))

    def _keys_at(self, at: int, count: int) -> tuple[int | None, ...]:
        if self._keys is None:
            return ()
        return tuple(None if key == NO_KEY else key for key in self._keys[at : at + count])

    def _join_records(self) -> None:
        """Make one of all records: a place has moved."""
        if self._records:
            self._records = deque([(self._records[-1][0], len(self._offsets))])

    @property
    def _columns(self) -> tuple[array[int], ...]:
        columns = (self._offsets, self._positions, self._plans, self._errors, self._slots)
        return columns if self._keys is None else (*columns, self._keys)

    def discard(self, offset: int) -> None:
        """Take out an offset, which is there."""
        self._gone.add(offset)
        self._trim()

    def take(self, start: int, count: int) -> list[PlainLetter | None] | None:
        """Take out neighbours near the front; None = not all of them wait there."""
        at = self._find(start, count)
        if at is None:
            return None
        plans, errors, slots = (
            column[at : at + count] for column in (self._plans, self._errors, self._slots)
        )
        keys = self._keys_at(at, count) or (None,) * count
        found = list(zip(plans, errors, slots, keys, strict=True))
        # thousands of letters share a few errors: one object for each of these
        known = {one: PlainLetter(*one) if one[0] else None for one in set(found)}
        letters = [known[one] for one in found]
        if at == self._first:
            self._first += count
        else:
            self._gone.update(range(start, start + count))
        self._trim()
        return letters

    def _find(self, start: int, count: int) -> int | None:
        offsets = self._offsets
        try:
            at = offsets.index(start, self._first, self._first + NEAR)
        except ValueError:
            return None
        wanted = range(start, start + count)
        if self._gone and not self._gone.isdisjoint(wanted):
            return None
        return at if offsets[at : at + count] == array("Q", wanted) else None

    def _trim(self) -> None:
        offsets, gone, first = self._offsets, self._gone, self._first
        while gone and first < len(offsets) and offsets[first] in gone:
            gone.remove(offsets[first])
            first += 1
        if first >= TRIMMED_AT and 2 * first >= len(offsets):
            for column in self._columns:
                del column[:first]
            moved = [(end, behind - first) for end, behind in self._records if behind > first]
            self._records = deque(moved)
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

    def neighbours(self, most: int) -> Iterator[Neighbours]:
        """Yield neighbours of one batch, at most so many together, in order. The queue
        must not change meanwhile.
        """
        start = count = batch = 0
        gone, positions = self._gone, self._positions
        for at in range(self._first, len(self._offsets)):
            if (offset := self._offsets[at]) in gone:
                continue
            if count and (offset != start + count or positions[at] != batch or count >= most):
                yield Neighbours(start, count, batch)
                count = 0
            if not count:
                start, batch = offset, positions[at]
            count += 1
        if count:
            yield Neighbours(start, count, batch)
