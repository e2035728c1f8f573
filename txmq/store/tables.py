"""Tables: where the broker keeps the state that is too wide for plain objects.

A table maps byte keys, ordered as bytes, to rows (tuples of what MessagePack can hold).
The broker keeps them in LMDB under an overlay in memory (`txmq.store.index`), the
simulation in `MemoryTables`. They are a fold of the log: whatever is in them can be
rebuilt, and nothing is in them that the log does not hold.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = tuple[Any, ...]

TOPICS, PARTITIONS, ENTRIES = "topics", "partitions", "entries"
PRODUCERS = "producers"
TRANSACTIONS, UNDECIDED, QUEUED, HOLDS = "transactions", "undecided", "queued", "holds"
JOBS, JOB_PARTS, JOB_WORK = "jobs", "job_parts", "job_work"
PIECES, BACKLOG, GATES = "pieces", "backlog", "gates"
CONFLICTS, LISTED, MARKS = "conflicts", "listed", "marks"
DUE = "due"
GROUPS, POSITIONS, FENCES = "groups", "positions", "fences"
MOVED, PARKED, LETTERS = "moved", "parked", "letters"
RETRIES, WAKES = "retries", "wakes"
XA, XIDS = "xa", "xids"  # keys: token; Xid (`branches`)
INSTANCES = "instances"  # key: service, 0, instance
PINS, PASSED = (
    "pins",
    "passed",
)  # keys: position in the log; group id, topic id, partition (`retention`)
DELAYED, DELAYED_IDS, DELAYED_AT, RECALLED = "delayed", "delayed_ids", "delayed_at", "recalled"
DEALT = "dealt"  # key: token; heuristics that somebody has dealt with (`branches`)
META = "meta"

NAMES = (
    TOPICS, PARTITIONS, ENTRIES, PRODUCERS, TRANSACTIONS, UNDECIDED, QUEUED, HOLDS, JOBS, JOB_PARTS, JOB_WORK,
    PIECES, BACKLOG, GATES, CONFLICTS, LISTED, MARKS, DUE, GROUPS, POSITIONS, FENCES, MOVED, PARKED, LETTERS,
    RETRIES, WAKES, XA, XIDS, INSTANCES, PINS, PASSED, DELAYED, DELAYED_IDS, DELAYED_AT, RECALLED, META, DEALT,
)  # fmt: skip

RANGED = frozenset({HOLDS, DELAYED})  # gets thousands of rows before it is first asked for a range

PARTITION_KEY = Struct(">II")  # topic id, partition
ENTRY_KEY = Struct(">IIQ")  # topic id, partition, base offset
TICKET_KEY = Struct(
    ">Q"
)  # position of the record that gave the ticket (tables undecided, queued, conflicts, backlog)
PIN_KEY = Struct(">Q")  # position in the log of what is kept there
HOLD_KEY = Struct(">IIQQ")  # topic id, partition, key hash + 2**63, ticket
LISTED_KEY = Struct(">B16s")  # kind (core/transactions/listed.py), token
JOB_PART_KEY = Struct(">16s16s")  # job token, token
PIECE_KEY = Struct(">16sI")  # token, number of the piece
DUE_KEY = Struct(">QBQ")  # due at, kind, position of the record that set the timer
GROUP_KEY = Struct(">I")  # group id; 0 = the row of the numbers next in turn
POSITION_KEY = Struct(">III")  # group id, topic id, partition
FENCE_KEY = Struct(">IIQ")  # group id, topic id, key hash + 2**63
MOVED_KEY = Struct(">IIIQ")  # group id, topic id, partition, offset
PARKED_KEY = Struct(
    ">IIQQIQ"
)  # group id, topic id, key hash + 2**63, entry's visible_at, partition, offset
LETTER_KEY = Struct(">IQ")  # group id, number in the group's order of dying
RETRY_KEY = Struct(
    ">IIIQQ"
)  # group id, topic id, partition, due at, offset: what waits for its next delivery
WAKE_KEY = Struct(
    ">QIIIQ"
)  # due at, group id, topic id, partition, offset: the same rows by time alone
DELAYED_KEY = Struct(">QQ")  # due at, position of the batch: a message of its own
MESSAGE_KEY = Struct(
    ">16sQ"
)  # producer id or token, sequence: the id of a message (table delayed_ids)
RECALLED_KEY = Struct(">Q16sQ")  # recalled at, id of the message

DUE_CHECK = 1  # kind of a DUE row: the check-back of a transaction; row = (token,)

SIGN = 1 << 63  # added to signed 64-bit key hashes so that they sort as unsigned bytes


class Entry(NamedTuple):
    """One published batch: its place in the log and what a reader needs to know before
    reading it (table `entries`).
    """

    position: int
    length: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    stored_at: int
    tag_filter: int
    visible_at: int  # log position that must be durable before anybody may see the batch


class Table(Protocol):
    """Rows in the order of their keys."""

    def get(self, key: bytes) -> Row | None:
        """The row of `key`."""

    def put(self, key: bytes, row: Row) -> None:
        """Set the row of `key`. The caller never changes the row afterwards."""

    def delete(self, key: bytes) -> None:
        """Forget `key`; a missing one is fine."""

    def range(
        self, start: bytes, stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Row]]:
        """Rows with start <= key < stop, in order, or from the last one down. The table
        must not change meanwhile.
        """


class Tables(Protocol):
    """All tables of one broker."""

    def __getitem__(self, name: str) -> Table:
        """The table of that name, one of `NAMES`."""


class MemoryTable:
    """A table in memory: the simulation's, and the model that the LMDB tables are
    tested against.
    """

    def __init__(self) -> None:
        self._rows: dict[bytes, Row] = {}
        self._keys: list[bytes] = []  # in order

    def get(self, key: bytes) -> Row | None:
        return self._rows.get(key)

    def put(self, key: bytes, row: Row) -> None:
        if key not in self._rows:
            insort(self._keys, key)
        self._rows[key] = row

    def delete(self, key: bytes) -> None:
        if self._rows.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def range(
        self, start: bytes, stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Row]]:
        keys, rows = self._keys, self._rows
        indexes = range(
            bisect_left(keys, start), len(keys) if stop is None else bisect_left(keys, stop)
        )
        for index in reversed(indexes) if reverse else indexes:
            yield keys[index], rows[keys[index]]

    def __len__(self) -> int:
        return len(self._rows)


class MemoryTables:
    """All tables in memory."""

    def __init__(self) -> None:
        self._tables = {name: MemoryTable() for name in NAMES}

    def __getitem__(self, name: str) -> MemoryTable:
        return self._tables[name]
