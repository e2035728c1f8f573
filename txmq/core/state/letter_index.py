"""The index of dead letters: the places by which selections find them.

Table `letter_index` has a row for each letter in each dimension (docs/decisions/0091).
All dimensions have the order of the deaths, so that the letters that have several
properties are where several ranges meet. All rows follow from table `failed`, as those
of `letter_cells` do.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from txmq.core.state import letter_cells
from txmq.core.state.letter_cells import LetterState
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from txmq.core.state.letter_cells import Letter
    from txmq.store.tables import Table, Tables


class Dimension(IntEnum):
    """A property that letters are found by; the numbers are on disk."""

    ALL = 0
    TOPIC = 1
    KEY = 2
    ERROR_TYPE = 3
    FINGERPRINT = 4


# Letters in these states stay until somebody acts. Others change with each delivery, so
# that more than one row would cost too much.
SETTLED = (LetterState.OPEN, LetterState.ABANDONED)

PREFIX = Struct(">IBBQ")  # group id, state, dimension, value
STATE_AT = 4  # of a prefix
# died at, number of the letter (0 = it has not died), topic id, partition, offset
PLACE = Struct(">QQIIQ")
FIRST = bytes(PLACE.size)  # sorts before all places
LAST = b"\xff" * (PLACE.size + 1)  # and this one behind them


def value_of(text: str) -> int:
    """Return the value that stands for a text in an index key."""
    return xxh3_64_intdigest(text.encode())


def add(tables: Mapping[str, Table] | Tables, group_id: int, letter: Letter) -> None:
    """Apply: index and count a letter."""
    index = tables[t.LETTER_INDEX]
    for key in keys_of(group_id, letter):
        index.put(key, ())
    letter_cells.count_letter(tables, group_id, letter)


def discard(
    tables: Mapping[str, Table] | Tables,
    group_id: int,
    letter: Letter,
    counted: Letter | None = None,
) -> None:
    """Apply: a letter leaves the index. `counted` is what it was counted as since."""
    index = tables[t.LETTER_INDEX]
    for key in keys_of(group_id, letter):
        index.delete(key)
    letter_cells.uncount_letter(tables, group_id, counted or letter)


def move(
    tables: Mapping[str, Table] | Tables,
    group_id: int,
    letter: Letter,
    to: LetterState,
) -> None:
    """Apply: an open letter goes to another settled state, in which it is counted
    already (`letter_cells.move_cells`).
    """
    index, state = tables[t.LETTER_INDEX], bytes((to,))
    for key in keys_of(group_id, letter):
        index.delete(key)
        index.put(key[:STATE_AT] + state + key[STATE_AT + 1 :], ())


def prefix(group_id: int, state: LetterState, dimension: Dimension, value: int = 0) -> bytes:
    """Return the beginning of the keys of the letters with this property."""
    return PREFIX.pack(group_id, state, dimension, value)


def keys_of(group_id: int, letter: Letter) -> Iterator[bytes]:
    """Yield the places of a letter in the index."""
    place = PLACE.pack(
        letter.died_at, letter.number, letter.topic_id, letter.partition, letter.offset
    )
    state = letter.state
    yield PREFIX.pack(group_id, state, Dimension.ALL, 0) + place
    if state not in SETTLED:
        return
    yield PREFIX.pack(group_id, state, Dimension.TOPIC, letter.topic_id) + place
    if letter.key_hash is not None:
        yield PREFIX.pack(group_id, state, Dimension.KEY, letter.key_hash + t.SIGN) + place
    error, print_ = value_of(letter.error_type), value_of(letter.fingerprint)
    yield PREFIX.pack(group_id, state, Dimension.ERROR_TYPE, error) + place
    yield PREFIX.pack(group_id, state, Dimension.FINGERPRINT, print_) + place
