"""Blocks of letters of replay plans: what putting them back has to know of many letters
in one row.

Before a plan is frozen, its letters are packed in the order of publication, up to 64 in
a row of table `plan_blocks`. The key is that of the last letter. A row is true as long
as none of its letters has changed: whatever changes a planned letter removes its block
(`forget`), and then each of its letters is looked at by itself. A block goes when it is
put back.

In an ordered group, whether a letter has to wait behind another one of its key shows
only when it is put back. So there a block has the hashes of the keys, too.
"""

from __future__ import annotations

from array import array
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state import letter_cells, plan_letters
from txmq.core.state.letter_cells import CellChange, CellKey
from txmq.core.state.plans import LetterOutcome
from txmq.core.state.put_back import NO_KEY
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.plan_letters import PlacedLetter
    from txmq.core.state.plans import Plan
    from txmq.core.state.state import State

LETTERS = 64  # of a block, at most


class BlockRun(NamedTuple):
    """Letters of a partition, in order. The columns are those of the queue
    (`put_back`), as bytes: eight of each letter, the slots four. Blocks of ordered
    groups have keys.

    A batch that was moved in the log since is still known by its former position.
    """

    topic_id: int
    partition: int
    offsets: bytes
    positions: bytes
    errors: bytes
    slots: bytes
    keys: bytes = b""


class Block(NamedTuple):
    """A row of table `plan_blocks`.

    `after` is the key of the letter before the first one, `exported` the number of
    letters that an export has. `cells` are changes of counts: topic id, error and slot
    of each with the fields of `CellChange`.
    """

    after: bytes
    first: bytes
    letters: int
    exported: int
    runs: tuple[BlockRun, ...]
    cells: tuple[tuple[int, ...], ...]

    @classmethod
    def from_row(cls, row: t.Row) -> Block:
        """Return the block that a row of table `plan_blocks` holds."""
        after, first, letters, exported, runs, cells = row
        return cls(after, first, letters, exported, tuple(BlockRun(*run) for run in runs), cells)

    def keyed_letters(self) -> list[tuple[MessageRef, int]]:
        """Return the letters of an ordered group that have keys, with their hashes."""
        return [
            ((run.topic_id, run.partition, offset), key_hash)
            for run in self.runs
            if run.keys
            for offset, key_hash in zip(array("Q", run.offsets), array("q", run.keys), strict=True)
            if key_hash != NO_KEY
        ]


class PlacedBlock(NamedTuple):
    """A block with its key, which is that of its last letter."""

    key: bytes
    block: Block


class _Builder:
    """A block to which letters are added."""

    def __init__(self, after: bytes, *, keyed: bool) -> None:
        self._after, self._first, self._last = after, b"", b""
        self._columns = "QQQIq" if keyed else "QQQI"
        self._letters = self._exported = 0
        self._runs: dict[tuple[int, int], tuple[array[int], ...]] = {}
        self._cells: dict[CellKey, CellChange] = {}

    def add(self, key: bytes, ref: MessageRef, row: FailedMessage) -> bool:
        """Add a letter; return True if the block is full."""
        died_at = row.died_at
        error = letter_cells.error_of(row.error_type, row.fingerprint)
        slot = letter_cells.slot_at(died_at)
        columns = self._runs.get(ref[:2])
        if columns is None:
            columns = self._runs[ref[:2]] = tuple(array(code) for code in self._columns)
        key_hash = NO_KEY if row.key_hash is None else row.key_hash
        values = (ref[2], row.position, error, slot, key_hash)
        for column, value in zip(columns, values, strict=False):
            column.append(value)
        letter_cells.add_to_cell(self._cells, (ref[0], error, slot), died_at, row.replays)
        self._first, self._last = self._first or key, key
        self._letters += 1
        self._exported += row.exported > 0
        return self._letters >= LETTERS

    def save(self, state: State) -> None:
        """Apply: write the block, if it has letters."""
        if not self._letters:
            return
        runs = tuple(
            BlockRun(*tp, *(column.tobytes() for column in columns))
            for tp, columns in self._runs.items()
        )
        cells = tuple((*cell, *change.fields) for cell, change in self._cells.items())
        block = Block(self._after, self._first, self._letters, self._exported, runs, cells)
        state.tables[t.PLAN_BLOCKS].put(self._last, tuple(block))


def pack(
    state: State,
    plan: Plan,
    cursor: bytes,
    find: Callable[[MessageRef], FailedMessage | None],
    *,
    keyed: bool,
) -> None:
    """Apply: make blocks of the next letters, up to the key `cursor`. `find` returns
    the row of a letter that the plan can put back without reading it again. `keyed`:
    the group is ordered.
    """
    after = plan.packed
    builder = _Builder(after, keyed=keyed)
    for key, letter in list(plan_letters.rows_of(state, plan.plan_id, after, cursor)):
        if letter[0] != LetterOutcome.PLANNED:
            continue
        ref: Any = t.PLAN_LETTER_KEY.unpack(key)[2:]
        row = find(ref)
        plain = row is not None and row.number == letter[1]
        if row is not None and plain and not builder.add(key, ref, row):
            after = key
            continue
        builder.save(state)
        after = key
        builder = _Builder(after, keyed=keyed)
    builder.save(state)
    plan.packed = cursor
    state.plans.dirty.add(plan.plan_id)


def forget(state: State, plan_id: int, visible_at: int, ref: MessageRef) -> None:
    """Apply: a letter changes that its plan has not put back. What its block says is
    true no more.
    """
    plan = state.plans.by_id.get(plan_id)
    if plan is None or not plan.packed:
        return
    key = plan_letters.key_of(plan_id, visible_at, ref)
    if not plan.cursor < key <= plan.packed:
        return
    for placed in islice(_blocks(state, plan_id, key), 1):
        if placed.block.first <= key:
            state.tables[t.PLAN_BLOCKS].delete(placed.key)


def remove(state: State, key: bytes) -> None:
    """Apply: a block is put back."""
    state.tables[t.PLAN_BLOCKS].delete(key)


def remove_passed(state: State, plan: Plan, cursor: bytes) -> None:
    """Apply: the plan's cursor goes to this key, and puts nothing back."""
    if plan.packed:
        start = max(plan.cursor + b"\0", t.PLAN_KEY.pack(plan.plan_id))
        for placed in list(_blocks(state, plan.plan_id, start, cursor)):
            remove(state, placed.key)


def forget_all(state: State, plan: Plan, most: int) -> bool:
    """Apply: remove at most so many blocks of a deleted plan. Return True if there are
    no more.
    """
    start = t.PLAN_KEY.pack(plan.plan_id)
    keys = [placed.key for placed in islice(_blocks(state, plan.plan_id, start), most)]
    for key in keys:
        remove(state, key)
    return len(keys) < most


def walk(
    state: State,
    plan: Plan,
    after: bytes,
    last: bytes | None = None,
    fits: Callable[[Block], bool] = lambda _block: True,
) -> Iterator[PlacedBlock | PlacedLetter]:
    """Yield the letters of a plan in order, from those behind the key `after` on, up to
    the key `last`: in blocks that lie between these keys and are wanted, or each.
    """
    if plan.packed:
        start = max(after + b"\0", t.PLAN_KEY.pack(plan.plan_id))
        for placed in _blocks(state, plan.plan_id, start, last):
            block = placed.block
            if block.first <= after:
                continue  # its first letters are put back
            if block.after > after:
                yield from plan_letters.letters_of(state, plan.plan_id, after, block.after)
            if fits(block):
                yield placed
            else:
                before = max(after, block.after)
                yield from plan_letters.letters_of(state, plan.plan_id, before, placed.key)
            after = placed.key
    if last is None or after < last:
        yield from plan_letters.letters_of(state, plan.plan_id, after, last)


def untouched(
    state: State, plan: Plan, cursor: bytes
) -> tuple[list[MessageRef | PlacedBlock], int]:
    """Return the letters that the plan's cursor passes on its way to this key, without
    those that have an outcome; and their number.
    """
    found: list[MessageRef | PlacedBlock] = []
    letters = 0
    for one in walk(state, plan, plan.cursor, cursor):
        if isinstance(one, PlacedBlock):
            found.append(one)
            letters += one.block.letters
        elif one.letter.outcome == LetterOutcome.PLANNED:
            found.append(one.ref)
            letters += 1
    return found, letters


def _blocks(
    state: State, plan_id: int, start: bytes, last: bytes | None = None
) -> Iterator[PlacedBlock]:
    stop = t.PLAN_KEY.pack(plan_id + 1) if last is None else last + b"\0"
    rows: Any = state.tables[t.PLAN_BLOCKS].range(start, stop)
    for key, row in rows:
        yield PlacedBlock(key, Block.from_row(row))
