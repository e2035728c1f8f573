"""A data directory with any number of dead letters, in little memory, on little disk.

    python -m tests.bench.many_letters DATA LETTERS

The messages are stored by the broker's core. No consumer fails: the rows of the deaths
are computed, and written in the order of their keys. So LMDB's pages are full, the log
has no records of deaths, and the program holds a part of the rows at a time. What it
leaves cannot be verified against its log, but is served like any other. Letters have no
history, as those of old versions.

Prints one JSON object: {"maker"}, the most resident bytes of the program.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack

from tests.bench.data_directories import PRODUCER, current_time, filling
from tests.bench.letters import KEYS, PRINTS, SPAN
from txmq.batch import encode, verify
from txmq.core.consumers.commands import JoinGroup, RequestedSettings
from txmq.core.state import failed_messages, letter_index
from txmq.core.state.consumer_groups import MessageRef
from txmq.core.state.failed_messages import FailedKind, FailedMessage
from txmq.core.state.letter_index import (
    PLACE,
    PREFIX,
    CellChange,
    CellKey,
    Dimension,
    LetterState,
    value_of,
)
from txmq.core.state.state import State
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.model.keys import key_hash
from txmq.model.message import Message
from txmq.store import tables as t
from txmq.store.filesystem import RealFileSystem
from txmq.store.index.lmdb_tables import DumpRow, LmdbTables
from txmq.store.log.segment import read_log_id

NO_FIELDS: Final = msgpack.packb(())
TOPIC, GROUP, PARTITIONS, BATCH = "orders", "g", 4, 500
ERRORS = 20
NO_VALUE = -1  # sorts before all others


class Letters(NamedTuple):
    """Dead letters 0 to `number`, from whose numbers all follows."""

    number: int
    first_at: int  # time of the first death in microseconds
    group_id: int
    topic_id: int
    batches: Sequence[t.BatchEntry]

    def rows(self) -> Iterator[DumpRow]:
        """Yield the rows of the tables of letters, each in the order of its keys."""
        yield from self._failed()
        for number in range(self.number):
            key = t.LETTER_KEY.pack(self.group_id, number + 1)
            yield t.LETTERS, key, msgpack.packb(self._ref(number))
        for dimension in Dimension:
            yield from self._indexed(dimension)
        yield from self._cells()

    def _ref(self, number: int) -> MessageRef:
        batch, row = divmod(number, BATCH)
        return self.topic_id, batch % PARTITIONS, batch // PARTITIONS * BATCH + row

    def died_at(self, number: int) -> int:
        """Return the time of a death in microseconds."""
        return self.first_at + number * (SPAN // self.number)

    def _failed(self) -> Iterator[DumpRow]:
        for batch in (
            batch
            for partition in range(PARTITIONS)
            for batch in range(partition, len(self.batches), PARTITIONS)
        ):
            for number in range(batch * BATCH, min(self.number, (batch + 1) * BATCH)):
                key = t.FAILED_KEY.pack(self.group_id, *self._ref(number))
                yield t.FAILED, key, msgpack.packb(tuple(self._row(number)))

    def _row(self, number: int) -> FailedMessage:
        batch, row = divmod(number, BATCH)
        hashed, died_at = hash_of(number), self.died_at(number)
        message = failed_messages.new_row(self.batches[batch], row, hashed, attempt=1)
        return message._replace(
            kind=FailedKind.LETTER, number=number + 1, dead_at=died_at, first_failed_at=died_at,
            consumer="m", error_type=error_of(number), error_text=text_of(number),
            fingerprint=print_of(number),
        )  # fmt: skip

    def _indexed(self, dimension: Dimension) -> Iterator[DumpRow]:
        """Yield the rows of a dimension: its values recur after so many letters."""
        values: dict[Dimension, list[int]] = {
            Dimension.ALL: [0],
            Dimension.TOPIC: [self.topic_id],
            Dimension.KEY: [
                NO_VALUE if (found := hash_of(number)) is None else found + t.SIGN
                for number in range(KEYS)
            ],
            Dimension.ERROR_TYPE: [value_of(error_of(number)) for number in range(ERRORS)],
            Dimension.FINGERPRINT: [value_of(print_of(number)) for number in range(PRINTS)],
        }
        every = len(values[dimension])
        for value, first in sorted(zip(values[dimension], range(every), strict=True)):
            if value == NO_VALUE:
                continue
            prefix = PREFIX.pack(self.group_id, LetterState.OPEN, dimension, value)
            for number in range(first, self.number, every):
                place = PLACE.pack(self.died_at(number), number + 1, *self._ref(number))
                yield t.LETTER_INDEX, prefix + place, NO_FIELDS

    def _cells(self) -> Iterator[DumpRow]:
        """Yield the counts of letters by error and time of death."""
        cells: dict[CellKey, CellChange] = {}
        names: dict[int, tuple[str, str]] = {}
        for number in range(self.number):
            error = letter_index.error_of(error_of(number), print_of(number))
            names[error], at = (error_of(number), print_of(number)), self.died_at(number)
            place = (self.topic_id, error, letter_index.slot_at(at))
            letter_index.add_to_cell(cells, place, at, 0)
        table = t.MemoryTable()
        for cell, change in cells.items():
            ids = self.group_id, LetterState.OPEN
            letter_index.count(table, *ids, cell, change, names[cell[1]])
        for key, row in table.range(b""):
            yield t.LETTER_CELLS, key, msgpack.packb(row)


def key_of(number: int) -> str:
    """Return the key of a letter; "" = it has none, like one in four."""
    key = number % KEYS
    return f"key-{key}" if key % 4 else ""


def hash_of(number: int) -> int | None:
    return key_hash(key_of(number)) if key_of(number) else None


def error_of(number: int) -> str:
    return f"E{number % ERRORS}"


def print_of(number: int) -> str:
    return f"p{number % PRINTS}"


def text_of(number: int) -> str:
    return f"no {number % PRINTS}"


def make(data: Path, count: int) -> None:
    """Make a data directory with letters of group `g` in topic `orders`."""
    with filling(data) as filler:
        filler.submit([CreateTopic(TOPIC, PARTITIONS)])
        filler.submit(batches(count), 100)
        behind = RequestedSettings(start="last")
        filler.submit([JoinGroup(GROUP, "m", "m", "concurrent", (TOPIC,), behind)])
        state = filler.engine.state
        letters, group = (
            letters_in(state, count, current_time() - SPAN),
            state.groups.by_name[GROUP],
        )
        group.letters, group.next_letter = count, count + 1
        state.groups.dirty_groups.add(group.group_id)
    log_id = read_log_id(RealFileSystem(), str(data))
    assert log_id is not None
    tables = LmdbTables.open(data / "index", log_id=log_id)
    with tables.dump() as (position, rows):
        others = list(rows)  # a row for each batch, and few besides
    tables.load(position, chain(others, letters.rows()))
    tables.close()


def letters_in(state: State, count: int, first_at: int) -> Letters:
    """Return the letters of the stored messages."""
    topic_id, group_id = state.topics[TOPIC].topic_id, state.groups.by_name[GROUP].group_id
    entries: list[t.BatchEntry] = []
    for number in range(-(-count // BATCH)):
        base = number // PARTITIONS * BATCH
        row: Any = state.entries.get(t.ENTRY_KEY.pack(topic_id, number % PARTITIONS, base))
        entries.append(t.BatchEntry(*row))
    return Letters(count, first_at, group_id, topic_id, entries)


def batches(count: int) -> Iterator[StoreBatch]:
    """Yield small messages in batches; the partitions take turns."""
    for number, start in enumerate(range(0, count, BATCH)):
        messages = [
            Message(b"{}", key_of(at) or None) for at in range(start, min(count, start + BATCH))
        ]
        data = encode(messages, producer_id=PRODUCER, epoch=0, sequence=start, born_at=1)
        yield StoreBatch(TOPIC, 0, number % PARTITIONS, data, verify(data))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024
    print(json.dumps({"maker": most}))
