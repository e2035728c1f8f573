"""Rows that older versions did not write, made of those that they wrote.

A start does this once, before it applies the first record.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.core.state import failed_rows, letter_cells, letter_index
from txmq.core.state.failed_rows import FailedMessage
from txmq.core.state.letter_cells import CELL_KEY, Cell, CellChange, LetterState
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.store.tables import Tables

BROKER_ROW = b"broker"
LETTERS_ROW = b"letter_index"  # says that the index of letters is there
LETTERS_VERSION = 3
SLOT_CELLS = 2  # the version whose cells are of a time slot, and not of a day
ROWS_PER_STEP = 10_000


def upgrade(tables: Tables) -> Iterator[None]:
    """Make what is missing, in steps. After each the caller may write to disk.

    An unfinished upgrade begins again.
    """
    meta = tables[t.META]
    if meta.get(BROKER_ROW) is None or meta.get(LETTERS_ROW) == (LETTERS_VERSION,):
        return
    if meta.get(LETTERS_ROW) == (SLOT_CELLS,):
        yield from _join_cells(tables)
        mark(tables)
        return
    for name in (t.LETTER_INDEX, t.LETTER_CELLS):
        yield from _clear(tables, name)
    after = b""
    while True:
        rows: Any = list(islice(tables[t.FAILED].range(after), ROWS_PER_STEP))
        for key, row in rows:
            group_id, *ref = t.FAILED_KEY.unpack(key)
            letter = failed_rows.letter_of(tuple(ref), FailedMessage(*row))
            if letter is not None:
                letter_index.add(tables, group_id, letter)
        yield
        if len(rows) < ROWS_PER_STEP:
            break
        after = rows[-1][0] + b"\0"
    mark(tables)


def mark(tables: Tables) -> None:
    """Write down that nothing is missing."""
    tables[t.META].put(LETTERS_ROW, (LETTERS_VERSION,))


def _clear(tables: Tables, name: str) -> Iterator[None]:
    while rows := list(islice(tables[name].range(b""), ROWS_PER_STEP)):
        for key, _row in rows:
            tables[name].delete(key)
        yield


def _join_cells(tables: Tables) -> Iterator[None]:
    """Add the cells of time slots to those of days. The rows of table `moved` do not
    tell what plans have put back, so that cells cannot be made of them.
    """
    cells, after = tables[t.LETTER_CELLS], b""
    while rows := list(islice(cells.range(after), ROWS_PER_STEP)):
        for key, row in rows:
            if len(row) == len(Cell._fields):
                continue  # it is of a day: this upgrade did not end before
            group_id, state, topic_id, error, slot = CELL_KEY.unpack(key)
            letters, replayed, first, last, *names = row
            cells.delete(key)
            change = CellChange(letters, replayed, first, last)
            letter_cells.count(
                cells, group_id, LetterState(state), (topic_id, error, slot), change, tuple(names)
            )
        yield
        after = rows[-1][0] + b"\0"
