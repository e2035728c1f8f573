"""A data directory with any number of dead letters, in little memory, on little disk.

    python -m tests.bench.many_letters DATA LETTERS [lean]

The messages are stored by the broker's core. No consumer fails: the rows of the deaths
are computed, and written in the order of their keys. So LMDB's pages are full, the log
has no records of deaths, and the program holds a part of the rows at a time. What it
leaves cannot be verified against its log, but is served like any other. Letters have no
history, as those of old versions.

`lean` letters have a small message and a short error, and no selection finds them:
their index is left out, which is most of the bytes and of the time.

Prints one JSON object: {"maker"}, the most resident bytes of the program.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from math import lcm
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from tests.bench.data_directories import current_time, filling
from tests.bench.letters import KEYS, PRINTS, SPAN, TRACEBACK
from txmq.batch import encode, verify
from txmq.core.consumers.commands import JoinGroup, RequestedSettings
from txmq.core.state import letter_cells
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.state.letter_cells import SLOT, CellChange, LetterState
from txmq.core.state.letter_index import PLACE, PREFIX, Dimension, value_of
from txmq.core.state.state import State
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.model.keys import key_hash, partition_of
from txmq.model.message import Message
from txmq.store import tables as t
from txmq.store.filesystem import RealFileSystem
from txmq.store.index.lmdb_tables import DumpRow, LmdbTables
from txmq.store.log.segment import read_log_id

NO_FIELDS: Final = msgpack.packb(())
TOPIC, GROUP, PARTITIONS, BATCH = "orders", "g", 4, 500
ERRORS, TENANTS = 20, 50
LEAN: Final = "lean"
PLACES: Final = np.dtype(
    [("died_at", ">u8"), ("number", ">u8"), ("topic", ">u4"), ("partition", ">u4"), ("at", ">u8")]
)


class Letters(NamedTuple):
    """Dead letters 0 to `number`, from whose numbers all follows."""

    number: int
    first_at: int  # time of the first death in microseconds
    group_id: int
    topic_id: int
    batches: Sequence[t.BatchEntry]
    lean: bool = False

    def rows(self) -> Iterator[DumpRow]:
        """Yield the rows of the tables of letters, each in the order of its keys."""
        yield from self._failed()
        yield from self._numbered()
        if not self.lean:
            yield from self._indexed()
            yield from self._cells()

    def died_at(self, number: int) -> int:
        """Return the time of a death in microseconds."""
        return self.first_at + number * self._step

    @property
    def _step(self) -> int:
        return SPAN // self.number

    def _failed(self) -> Iterator[DumpRow]:
        pack, at = msgpack.Packer().pack, t.FAILED_KEY.pack
        for partition in range(PARTITIONS):
            ids = self.group_id, self.topic_id, partition
            for batch in range(partition, len(self.batches), PARTITIONS):
                entry, first = self.batches[batch], batch * BATCH
                base = batch // PARTITIONS * BATCH
                for row in range(min(BATCH, self.number - first)):
                    letter = self._row(entry, first + row, row)
                    yield t.FAILED, at(*ids, base + row), pack(letter)

    def _row(self, entry: t.BatchEntry, number: int, row: int) -> FailedMessage:
        died_at = self.died_at(number)
        return FailedMessage(
            *(FailedKind.LETTER, 1, 0, key_of(number).hashed),
            *(entry.position, entry.length, row, entry.visible_at, entry.stored_at),
            *("m", error_of(number), text_of(number, lean=self.lean), print_of(number)),
            *(died_at, died_at, number + 1),
        )

    def _numbered(self) -> Iterator[DumpRow]:
        pack, at = msgpack.Packer().pack, t.LETTER_KEY.pack
        for batch, _entry in enumerate(self.batches):
            first, base = batch * BATCH, batch // PARTITIONS * BATCH
            for row in range(min(BATCH, self.number - first)):
                ref = self.topic_id, batch % PARTITIONS, base + row
                yield t.LETTERS, at(self.group_id, first + row + 1), pack(ref)

    def _indexed(self) -> Iterator[DumpRow]:
        """Yield the rows of the letters in all dimensions."""
        places, size = self._places(), PLACE.size
        for dimension in Dimension:
            for value, numbers in sorted(self._numbers(dimension).items()):
                prefix = PREFIX.pack(self.group_id, LetterState.OPEN, dimension, value)
                for number in numbers:
                    place = places[number * size : (number + 1) * size]
                    yield t.LETTER_INDEX, prefix + place, NO_FIELDS

    def _places(self) -> bytes:
        """Return the places of all letters in the index, in one."""
        numbers = np.arange(self.number)
        batches, rows = np.divmod(numbers, BATCH)
        places = np.empty(self.number, PLACES)
        places["died_at"] = self.first_at + numbers * self._step
        places["number"] = numbers + 1
        places["topic"], places["partition"] = self.topic_id, batches % PARTITIONS
        places["at"] = batches // PARTITIONS * BATCH + rows
        return places.tobytes()

    def _numbers(self, dimension: Dimension) -> dict[int, Sequence[int]]:
        """Return the letters by their values in a dimension."""
        if dimension is Dimension.KEY:
            found: dict[int, list[int]] = {}
            for number in range(self.number):
                found.setdefault(key_of(number).hashed + t.SIGN, []).append(number)
            return dict(found)
        values = {
            Dimension.ALL: [0],
            Dimension.TOPIC: [self.topic_id],
            Dimension.ERROR_TYPE: [value_of(error_of(number)) for number in range(ERRORS)],
            Dimension.FINGERPRINT: [value_of(print_of(number)) for number in range(PRINTS)],
        }[dimension]
        return {value: range(first, self.number, len(values)) for first, value in enumerate(values)}

    def _cells(self) -> Iterator[DumpRow]:
        """Yield the counts of letters by error and time of death."""
        table, errors, start = t.MemoryTable(), lcm(ERRORS, PRINTS), 0
        while start < self.number:
            slot = letter_cells.slot_at(self.died_at(start))
            end = min(self.number, start - (self.died_at(start) - (slot + 1) * SLOT) // self._step)
            for first in range(start, min(end, start + errors)):
                numbers = range(first, end, errors)
                times = self.died_at(first), self.died_at(numbers[-1])
                names = error_of(first), print_of(first)
                cell = self.topic_id, letter_cells.error_of(*names), slot
                change = CellChange(len(numbers), 0, *times)
                letter_cells.count(table, self.group_id, LetterState.OPEN, cell, change, names)
            start = end
        for key, row in table.range(b""):
            yield t.LETTER_CELLS, key, msgpack.packb(row)


class Key(NamedTuple):
    """A key of messages, with its hash."""

    text: str
    hashed: int


def key_of(number: int) -> Key:
    """Return the key of a letter. The keys of a partition take turns."""
    turn, at = divmod(number, BATCH * PARTITIONS)
    partition, row = divmod(at, BATCH)
    keys = keys_by_partition(KEYS)[partition]
    return keys[(turn * BATCH + row) % len(keys)]


@cache
def keys_by_partition(count: int) -> list[list[Key]]:
    """Return so many keys by the partitions that producers send them to."""
    found: list[list[Key]] = [[] for _ in range(PARTITIONS)]
    for key in (f"key-{number}" for number in range(count)):
        found[partition_of(key, PARTITIONS)].append(Key(key, key_hash(key)))
    return found


def error_of(number: int) -> str:
    return f"E{number % ERRORS}"


def print_of(number: int) -> str:
    return f"p{number % PRINTS}"


def text_of(number: int, *, lean: bool) -> str:
    return f"{'' if lean else TRACEBACK}no {number % PRINTS}"


def make(data: Path, count: int, *, lean: bool = False) -> None:
    """Make a data directory with letters of group `g` in topic `orders`."""
    with filling(data) as filler:
        filler.submit([CreateTopic(TOPIC, PARTITIONS)])
        filler.submit(batches(count, lean=lean), 100)
        behind = RequestedSettings(start="last")
        filler.submit([JoinGroup(GROUP, "m", "m", "concurrent", (TOPIC,), behind)])
        state = filler.engine.state
        letters = letters_in(state, count, current_time() - SPAN, lean=lean)
        group = state.groups.by_name[GROUP]
        group.letters, group.next_letter = count, count + 1
        state.groups.dirty_groups.add(group.group_id)
    log_id = read_log_id(RealFileSystem(), str(data))
    assert log_id is not None
    tables = LmdbTables.open(data / "index", log_id=log_id)
    with tables.dump() as (position, rows):
        others = list(rows)  # a row for each batch, and few besides
    tables.load(position, chain(others, letters.rows()))
    tables.close()


def letters_in(state: State, count: int, first_at: int, *, lean: bool = False) -> Letters:
    """Return the letters of the stored messages."""
    topic_id, group_id = state.topics[TOPIC].topic_id, state.groups.by_name[GROUP].group_id
    entries: list[t.BatchEntry] = []
    for number in range(-(-count // BATCH)):
        base = number // PARTITIONS * BATCH
        row: Any = state.entries.get(t.ENTRY_KEY.pack(topic_id, number % PARTITIONS, base))
        entries.append(t.BatchEntry(*row))
    return Letters(count, first_at, group_id, topic_id, entries, lean)


def batches(count: int, *, lean: bool = False) -> Iterator[StoreBatch]:
    """Yield messages in batches; the partitions take turns."""
    body = b"{}" if lean else b"x" * 200
    tenants = [None if lean else {"tenant": f"t{number}"} for number in range(TENANTS)]
    for number, start in enumerate(range(0, count, BATCH)):
        messages = [
            Message(body, key_of(start + row).text, headers=tenants[row % TENANTS])
            for row in range(min(BATCH, count - start))
        ]
        data = encode(messages, producer_id=start.to_bytes(16), epoch=0, sequence=0, born_at=1)
        yield StoreBatch(TOPIC, 0, number % PARTITIONS, data, verify(data))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]), lean=LEAN in sys.argv[3:])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024
    print(json.dumps({"maker": most}))
