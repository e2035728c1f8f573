"""Tables of the broker's state: their names, their keys, and what a table can do.

A table maps byte keys, ordered as bytes, to rows: tuples of what MessagePack can hold.
It keeps state that is too large for plain objects. The broker has its tables in LMDB
under an overlay in memory (`txmq.store.index`), the simulation in `MemoryTables`. They
are a fold of the log: they can be rebuilt, and hold nothing that the log does not hold.

Names and keys are part of the format of snapshots.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from txmq.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = tuple[Any, ...]


class IndexDamaged(StoreError):
    """A read of the index met a page or a row that nobody wrote."""

    @classmethod
    def because(cls, error: Exception) -> IndexDamaged:
        return cls(
            f"the index is damaged: {type(error).__name__}: {error}",
            hint="restart the broker: it makes the index anew from snapshot and log",
        )


META = "meta"
TOPICS, PARTITIONS, ENTRIES = "topics", "partitions", "entries"
PRODUCERS = "producers"
INSTANCES = "instances"  # key: service, 0, instance
# bundles and their order
TRANSACTIONS, UNDECIDED, QUEUED, HOLDS = "transactions", "undecided", "queued", "holds"
JOBS, JOB_PARTS, JOB_WORK = "jobs", "job_parts", "job_work"
PIECES, BACKLOG, BARRIERS = "pieces", "backlog", "barriers"
CONFLICTS, LISTED, WATERMARKS = "conflicts", "listed", "watermarks"
DUE = "due"
XA, XIDS = "xa", "xids"  # keys: token; Xid
HANDLED_HEURISTICS = "handled_heuristics"  # key: token
# consumers
GROUPS, POSITIONS, FENCES = "groups", "positions", "fences"
FAILED, PARKED, LETTERS = "failed", "parked", "letters"
RETRIES, RETRIES_BY_TIME = "retries", "retries_by_time"
ATTEMPTS = "attempts"  # key: that of `failed`
EDITS = "edits"  # versions of edited messages, key: that of `failed`, number
COPIES = "copies"  # of letters in other topics, key: that of `failed`, number
LETTER_NOTES = "letter_notes"  # key: group id, fingerprint
SELECTIONS = "selections"  # key: name
LETTER_INDEX, LETTER_CELLS = "letter_index", "letter_cells"  # core/state/letter_*.py
LOCAL = "local"  # messages in consumers' stores, and orders to these stores
PLANS, PLAN_LETTERS = "plans", "plan_letters"  # replay plans; their letters and outcomes
PLAN_DONE = "plan_done"  # letters of plans that are processed: 64 neighbours in a row
POLICIES = "policies"  # of replays; key: group id
USERS = "users"  # key: name
# delayed messages
DELAYED, DELAYED_IDS, DELAYED_AT, RECALLED = "delayed", "delayed_ids", "delayed_at", "recalled"
# retention
LOG_PINS, MISSED = "log_pins", "missed"
SERIES = "series"  # numbers for charts, step by step

NAMES = (
    TOPICS, PARTITIONS, ENTRIES, PRODUCERS, TRANSACTIONS, UNDECIDED, QUEUED, HOLDS, JOBS,
    JOB_PARTS, JOB_WORK, PIECES, BACKLOG, BARRIERS, CONFLICTS, LISTED, WATERMARKS, DUE, GROUPS,
    POSITIONS, FENCES, FAILED, PARKED, LETTERS, RETRIES, RETRIES_BY_TIME, XA, XIDS, INSTANCES,
    LOG_PINS, MISSED, DELAYED, DELAYED_IDS, DELAYED_AT, RECALLED, META, HANDLED_HEURISTICS,
    ATTEMPTS, LETTER_INDEX, LETTER_CELLS, LOCAL, LETTER_NOTES, SELECTIONS, PLANS,
    PLAN_LETTERS, POLICIES, EDITS, COPIES, USERS, PLAN_DONE, SERIES,
)  # fmt: skip

# thousands of rows are put before the first scan of a range
SCANNED = frozenset({HOLDS, DELAYED, LETTER_INDEX})

# a delivery reads large rows several times: to plan it, to decide it, to record it
REREAD = frozenset({FAILED})

PARTITION_KEY = Struct(">II")  # topic id, partition
ENTRY_KEY = Struct(">IIQ")  # topic id, partition, base offset
# ticket: tables undecided, queued, conflicts and backlog
TICKET_KEY = Struct(">Q")
PIN_KEY = Struct(">Q")  # position in the log
HOLD_KEY = Struct(">IIQQ")  # topic id, partition, key hash + SIGN, ticket
LISTED_KEY = Struct(">B16s")  # kind of list, token
JOB_PART_KEY = Struct(">16s16s")  # token of the job, token
PIECE_KEY = Struct(">16sI")  # token, number of the piece
DUE_KEY = Struct(">QBQ")  # due at, kind, position of the record that set the timer
GROUP_KEY = Struct(">I")  # group id; 0 = the row of counters
POSITION_KEY = Struct(">III")  # group id, topic id, partition
FENCE_KEY = Struct(">IIQ")  # group id, topic id, key hash + SIGN
FAILED_KEY = Struct(">IIIQ")  # group id, topic id, partition, offset
# group id, topic id, partition, offset, number of the version or copy
EDIT_KEY = Struct(">IIIQI")
# group id, topic id, key hash + SIGN, visible_at of the batch, partition, offset
PARKED_KEY = Struct(">IIQQIQ")
LETTER_KEY = Struct(">IQ")  # group id, number of the dead letter in the group
RETRY_KEY = Struct(">IIIQQ")  # group id, topic id, partition, due at, offset
RETRY_TIME_KEY = Struct(">QIIIQ")  # due at, group id, topic id, partition, offset
# group id, 0 = message or 1 = order, store id, topic id, partition, offset
LOCAL_KEY = Struct(">IB16sIIQ")
# group id, 2, store id, first failed at, topic id, partition, offset
LOCAL_TIME_KEY = Struct(">IB16sQIIQ")
PLAN_KEY = Struct(">I")  # plan id; 0 = the row of counters
# plan id, visible_at of the batch, topic id, partition, offset
PLAN_LETTER_KEY = Struct(">IQIIQ")
# plan id, topic id, partition, number of the chunk: 64 offsets
PLAN_DONE_KEY = Struct(">IIIQ")
DELAYED_KEY = Struct(">QQ")  # due at, position of the message's batch
MESSAGE_KEY = Struct(">16sQ")  # message id: producer id or token, sequence
SERIES_KEY = Struct(">BI")  # kind of row, place in its ring
RECALLED_KEY = Struct(">Q16sQ")  # recalled at, message id

DUE_CHECK = 1  # kind of a DUE row: the check-back of a transaction; row = (token,)

# Added to signed 64-bit key hashes, so that they sort as unsigned bytes. Also an upper
# bound of offsets and positions.
SIGN = 1 << 63
MAX_EDIT = (1 << 32) - 1  # above the numbers of versions and copies


class BatchEntry(NamedTuple):
    """A row of table `entries`: the place of a published batch in the log, and what a
    reader needs before it reads the batch.
    """

    position: int
    length: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    stored_at: int
    tag_filter: int
    visible_at: int  # log position that must be durable before readers see the batch


class Table(Protocol):
    """Rows in the order of their keys."""

    def get(self, key: bytes) -> Row | None:
        """Return the row of `key`."""

    def put(self, key: bytes, row: Row) -> None:
        """Set the row of `key`. The row must not change afterwards."""

    def delete(self, key: bytes) -> None:
        """Delete the row of `key`, if there is one."""

    def range(
        self, start: bytes, stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Row]]:
        """Yield the rows with start <= key < stop, in order or in reverse. The table
        must not change meanwhile.
        """


class Tables(Protocol):
    """All tables of one broker."""

    def __getitem__(self, name: str) -> Table:
        """Return a table by its name in `NAMES`."""


class MemoryTable:
    """A table in memory: for the simulation, and the model of the LMDB tables'
    tests.
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
