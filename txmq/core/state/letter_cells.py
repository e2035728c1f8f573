"""Cells: numbers of the dead letters that share state, topic, error and day of death.

A row of table `letter_cells` counts them by quarters of an hour (docs/decisions/0091).
All rows follow from table `failed`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_64_intdigest

from txmq.model.units import DAY, MINUTE
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from txmq.store.tables import Table, Tables

SLOT = 15 * MINUTE  # to which the times of death of counted letters are known
DAY_SLOTS = DAY // SLOT  # of one cell
CELL_KEY = Struct(">IBIQQ")  # group id, state, topic id, hash of the error, day
STATE_AT = 4  # in the key
DAY_SIZE = 8  # bytes of a day, at the end of the key
LAST_DAY = (1 << 64) - 1
MAX_SEEKS = 512  # in table `letter_cells`, to find the next slot: a few ms


class LetterState(IntEnum):
    """Place of a message that has failed; the numbers are on disk."""

    OPEN = 1
    REPLAYING = 2  # delivered again, or an undecided transaction replays it
    ABANDONED = 3
    LOCAL = 4  # retried from the local store of a consumer
    RETRYING = 5  # retried by the broker, and never dead


class Letter(NamedTuple):
    """Message as index and cells know it. `died_at` is the time of its first failure
    where it has not died.
    """

    state: LetterState
    topic_id: int
    partition: int
    offset: int
    died_at: int
    number: int
    key_hash: int | None
    error_type: str
    fingerprint: str
    replays: int


class Cell(NamedTuple):
    """Letters of a group that share state, topic, error and day of death.

    `first` and `last` are the deaths of the first and the last one that was counted
    here, also of those that have left since. `slots` has the time slots of the day with
    letters, in order, each followed by the number of its letters.
    """

    letters: int
    replayed: int
    first: int
    last: int
    error_type: str
    fingerprint: str
    slots: tuple[int, ...]


@dataclass(slots=True)
class CellChange:
    """Letters of a cell and a time slot that are put back together."""

    letters: int
    replayed: int
    first: int
    last: int

    @property
    def fields(self) -> tuple[int, int, int, int]:
        return (self.letters, self.replayed, self.first, self.last)


CellKey = tuple[int, int, int]  # topic id, error and slot
CellChanges = dict[CellKey, CellChange]


@dataclass(slots=True)
class _DayChange:
    """Letters of a cell that are put back or abandoned together, `slots` by the time
    slots of its day.
    """

    total: CellChange
    slots: dict[int, int]

    def add(self, slot: int, change: CellChange) -> None:
        """Add letters of another time slot."""
        before = self.total
        self.total = CellChange(
            before.letters + change.letters,
            before.replayed + change.replayed,
            min(before.first, change.first),
            max(before.last, change.last),
        )
        self.slots[slot] = change.letters


class CellsOfError(NamedTuple):
    """Neighbouring cells that differ only in their days, in order."""

    topic_id: int
    days: list[int]
    cells: list[tuple[Any, ...]]


@lru_cache(maxsize=1_024)  # thousands of letters share a few errors
def error_of(error_type: str, fingerprint: str) -> int:
    """Return the value that stands for an error in the keys of cells."""
    return xxh3_64_intdigest(f"{error_type}\0{fingerprint}".encode())


def slot_at(at: int) -> int:
    """Return the time slot of a death."""
    return at // SLOT


def add_to_cell(cells: CellChanges, key: CellKey, died_at: int, replays: int) -> None:
    """Add a letter to the change of its cell."""
    change = cells.get(key)
    if change is None:
        cells[key] = CellChange(1, int(bool(replays)), died_at, died_at)
        return
    change.letters += 1
    change.replayed += bool(replays)
    change.first = min(change.first, died_at)
    change.last = max(change.last, died_at)


def move_cells(
    tables: Mapping[str, Table] | Tables,
    group_id: int,
    state: LetterState,
    changed: CellChanges,
) -> None:
    """Apply: open letters are counted in another state from now on. They keep their
    places in the index until they end or fail, or are swept.
    """
    cells = tables[t.LETTER_CELLS]
    days: dict[bytes, _DayChange] = {}
    for cell, change in changed.items():
        key, slot = _key_of(group_id, LetterState.OPEN, cell)
        day = days.get(key)
        if day is None:
            days[key] = _DayChange(change, {slot: change.letters})
        else:
            day.add(slot, change)
    for key, day in days.items():
        total = day.total
        row: Any = cells.get(key)
        found = Cell(*row)
        names = found.error_type, found.fingerprint
        _take(cells, key, found, total.letters, total.replayed, day.slots)
        now_replayed = total.letters if state is LetterState.REPLAYING else total.replayed
        moved = CellChange(total.letters, now_replayed, total.first, total.last)
        _add(cells, key[:STATE_AT] + bytes((state,)) + key[STATE_AT + 1 :], moved, names, day.slots)


def count_processed(
    tables: Mapping[str, Table] | Tables, group_id: int, cells: dict[tuple[int, int, int], int]
) -> None:
    """Apply: letters that were put back are processed, so many of each cell: topic id,
    error and slot. Their places in the index stay until they are swept.
    """
    for cell, letters in cells.items():
        _uncount(tables[t.LETTER_CELLS], group_id, LetterState.REPLAYING, cell, letters, letters)


def count_letter(tables: Mapping[str, Table] | Tables, group_id: int, letter: Letter) -> None:
    """Apply: count a letter."""
    at = letter.died_at
    change = CellChange(1, int(bool(letter.replays)), at, at)
    names = (letter.error_type, letter.fingerprint)
    count(tables[t.LETTER_CELLS], group_id, letter.state, _cell_of(letter), change, names)


def uncount_letter(tables: Mapping[str, Table] | Tables, group_id: int, letter: Letter) -> None:
    """Apply: count a letter no longer."""
    cells, replayed = tables[t.LETTER_CELLS], int(bool(letter.replays))
    _uncount(cells, group_id, letter.state, _cell_of(letter), 1, replayed)


def count(
    cells: Table,
    group_id: int,
    state: LetterState,
    cell: CellKey,
    change: CellChange,
    names: tuple[str, str],
) -> None:
    """Apply: count letters. `names` are their error type and their fingerprint."""
    key, slot = _key_of(group_id, state, cell)
    _add(cells, key, change, names, {slot: change.letters})


def _add(
    cells: Table, key: bytes, change: CellChange, names: tuple[str, str], slots: dict[int, int]
) -> None:
    """Count letters in a cell, by the time slots of its day."""
    letters, replayed, first, last = change.fields
    row: Any = cells.get(key)
    found = Cell(0, 0, first, last, *names, ()) if row is None else Cell(*row)
    row = (
        found.letters + letters,
        found.replayed + replayed,
        min(found.first, first),
        max(found.last, last),
        found.error_type,
        found.fingerprint,
        _with(found.slots, slots),
    )
    cells.put(key, row)


def _uncount(
    cells: Table, group_id: int, state: LetterState, cell: CellKey, letters: int, replayed: int
) -> None:
    """Count letters no longer."""
    key, slot = _key_of(group_id, state, cell)
    row: Any = cells.get(key)
    _take(cells, key, Cell(*row), letters, replayed, {slot: letters})


def _take(
    cells: Table, key: bytes, found: Cell, letters: int, replayed: int, slots: dict[int, int]
) -> None:
    """Count letters of a cell no longer, by the time slots of its day."""
    if found.letters == letters:
        cells.delete(key)
        return
    left = _with(found.slots, {slot: -count for slot, count in slots.items()})
    cells.put(key, (found.letters - letters, found.replayed - replayed, *found[2:-1], left))


def _with(slots: tuple[int, ...], changes: dict[int, int]) -> tuple[int, ...]:
    """Return the slots of a cell with letters more or fewer in some of them."""
    for slot, change in changes.items():
        start = end = 2 * bisect_left(slots[::2], slot)
        letters = change
        if start < len(slots) and slots[start] == slot:
            end += 2
            letters += slots[start + 1]
        slots = (*slots[:start], *((slot, letters) if letters else ()), *slots[end:])
    return slots


def cells(
    tables: Mapping[str, Table], group_id: int, state: LetterState, after: bytes, most: int
) -> tuple[list[CellsOfError], bytes | None]:
    """Return at most so many cells of a state, those behind the key `after`, and the
    key of the last one; None = there are no more.

    There may be very many of them: their rows are not made to `Cell`s.
    """
    start = after + b"\0" if after else CELL_KEY.pack(group_id, state, 0, 0, 0)
    stop = CELL_KEY.pack(group_id, state + 1, 0, 0, 0)
    found: list[CellsOfError] = []
    error, key, number = b"", b"", 0
    for number, (key, row) in enumerate(  # noqa: B007  # the last one counts
        islice(tables[t.LETTER_CELLS].range(start, stop), most), 1
    ):
        if key[:-DAY_SIZE] != error:
            error = key[:-DAY_SIZE]
            found.append(CellsOfError(CELL_KEY.unpack(key)[2], [], []))
        found[-1].days.append(int.from_bytes(key[-DAY_SIZE:]))
        found[-1].cells.append(row)
    return found, key if number == most else None


def next_slot(
    tables: Mapping[str, Table] | Tables,
    group_id: int,
    state: LetterState,
    slot: int,
    keep: Callable[[int, Cell], bool],
) -> int | None:
    """Return a slot, from this one on, before which no letter of the state died that
    `keep` takes the cell of; None = there is none at all any more.

    `keep` gets the topic's id and any cell of an error. Where there are very many
    errors, this is the same slot.
    """
    table = tables[t.LETTER_CELLS]
    start = CELL_KEY.pack(group_id, state, 0, 0, 0)
    stop = CELL_KEY.pack(group_id, state + 1, 0, 0, 0)
    first: int | None = None
    for _ in range(MAX_SEEKS):
        key, row = next(iter(table.range(start, stop)), (None, None))
        if key is None:
            return first
        _group, _state, topic_id, error, day = CELL_KEY.unpack(key)
        fields: Any = row
        cell = Cell(*fields)
        kept = keep(topic_id, cell)
        if kept and day < slot // DAY_SLOTS:
            start = CELL_KEY.pack(group_id, state, topic_id, error, slot // DAY_SLOTS)
            continue
        if kept:
            at = next((at for at in slots_of(day, cell) if at >= slot), None)
            if at is None:
                start = CELL_KEY.pack(group_id, state, topic_id, error, day + 1)
                continue
            first = at if first is None else min(first, at)
        start = CELL_KEY.pack(group_id, state, topic_id, error, LAST_DAY) + b"\0"
    return slot


def slots_of(day: int, cell: Cell) -> Iterator[int]:
    """Yield the time slots of a cell, in order."""
    return (day * DAY_SLOTS + slot for slot in cell.slots[::2])


def _cell_of(letter: Letter) -> CellKey:
    error = error_of(letter.error_type, letter.fingerprint)
    return letter.topic_id, error, slot_at(letter.died_at)


def _key_of(group_id: int, state: LetterState, cell: CellKey) -> tuple[bytes, int]:
    """Return the key of a cell, and the slot of its day."""
    topic_id, error, slot = cell
    day, slot = divmod(slot, DAY_SLOTS)
    return CELL_KEY.pack(group_id, state, topic_id, error, day), slot
