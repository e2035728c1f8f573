"""State of a local store: a fold of its log over tables.

The same `apply` serves a record that was just appended and one that is read at start.
What the tables hold can therefore be made again from the log at any time.

    messages  place                    -> Row
    due       due time, place          -> ()    what may be handed out: heads of keys
    chains    key's hash, run, place   -> ()    keys in their order, while they are held
              key's hash               -> run and place of the first and of the last
    untold    run, place               -> ()    what the broker does not know
    ages      time of arrival, place   -> ()    what is not acked

Within a partition a key's messages are in the order of offsets. A message that arrives
when its key has none, or the last one in another partition, begins a new run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol

from txmq.errors import UnsupportedFormat
from txmq.model.keys import key_hash
from txmq.recover.local_store.records import (
    CHANGED,
    ENTRY,
    FORGOTTEN,
    RELEASED,
    STORED,
    TOLD,
    LyingRecord,
    Row,
    StoredHead,
    decode_changes,
    decode_places,
    decode_released,
    decode_stored,
    decode_told,
    failure_of,
)
from txmq.recover.local_store.values import Entry, Place, State
from txmq.store.log.record import LOST
from txmq.store.tables import META, SIGN, IndexDamaged, Table

if TYPE_CHECKING:
    from txmq.recover.local_store.records import Changes, Told
    from txmq.store.log.record import Record

MESSAGES, DUE, CHAINS, UNTOLD, AGES = "messages", "due", "chains", "untold", "ages"
NAMES = (MESSAGES, DUE, CHAINS, UNTOLD, AGES, META)
RECORDS = frozenset((STORED, CHANGED, TOLD, FORGOTTEN, RELEASED, ENTRY))

_PLACE = Struct(">IIQ")
_TIME = Struct(">Q")
_LINK = Struct(">QIIQ")  # run, place
_COUNTERS = b"counters"
_HOLDING = frozenset(State) - {State.ACKED}  # they hold the key
_NO_ROW: tuple[object, ...] = ()


class StateTables(Protocol):
    """The tables that the state is kept in."""

    def __getitem__(self, name: str) -> Table:
        """Return a table by its name in `NAMES`."""


class StoreState:
    """The state of one store. One thread at a time may use it.

    `messages` and `bytes` count what is not acked, `settled` what is and not yet
    forgotten; `live` has the messages and bytes of each segment, by its first position.
    Below `released` the log may have no segments. `run` is the last run.
    """

    def __init__(
        self,
        tables: StateTables,
        segment_of: Callable[[int], int],
        topic_id: int,
        *,
        ordered: bool,
    ) -> None:
        """Take over what `tables` hold; `segment_of` returns the first position of the
        segment with a position.
        """
        self._messages, self._due, self._chains = tables[MESSAGES], tables[DUE], tables[CHAINS]
        self._untold, self._ages, self._meta = tables[UNTOLD], tables[AGES], tables[META]
        self._segment_of = segment_of
        self._topic_id, self._ordered = topic_id, ordered
        self.messages = self.settled = self.bytes = self.attempts = self.run = self.released = 0
        self.live: dict[int, list[int]] = {}
        self._asked: tuple[bytes, tuple[bytes, bytes] | None] = b"", None
        if (row := self._meta.get(_COUNTERS)) is not None:
            try:
                self._load(*row)
            except (TypeError, ValueError) as error:
                raise IndexDamaged.because(error) from error

    def _load(self, counters: tuple[int, ...], live: tuple[tuple[int, int, int], ...]) -> None:
        self.messages, self.settled, self.bytes, self.attempts, self.run, self.released = counters
        self.live = {first: [count, size] for first, count, size in live}

    def save(self) -> None:
        """Put the counters into the tables, which are about to be committed."""
        live = tuple((first, *counts) for first, counts in sorted(self.live.items()))
        counters = (self.messages, self.settled, self.bytes, self.attempts, self.run, self.released)
        self._meta.put(_COUNTERS, (counters, live))

    @property
    def live_bytes(self) -> int:
        """Bytes of the records that are still needed."""
        return sum(size for _, size in self.live.values())

    def apply(self, record: Record) -> None:
        """Apply a record. Raises LyingRecord for one that makes no sense, and changes
        nothing then; UnsupportedFormat for one of a newer version.
        """
        kind, size = record.kind, record.end - record.position
        if kind in {STORED, ENTRY}:
            head = decode_stored(record)
            if head.topic_id != self._topic_id:
                raise LyingRecord(f"a message of topic {head.topic_id}")
            self.store(head, record.position, size, whole=kind == STORED)
        elif kind == CHANGED:
            self.change(decode_changes(record))
        elif kind == TOLD:
            self.tell(decode_told(record))
        elif kind == FORGOTTEN:
            self.forget(decode_places(record))
        elif kind == RELEASED:
            self.released = max(self.released, decode_released(record))
        elif kind != LOST:
            raise UnsupportedFormat(f"the record at {record.position}", kind, max(RECORDS))

    def store(
        self, head: StoredHead, position: int, size: int, *, whole: bool, new: bool = False
    ) -> None:
        """Set the row of a message; `new`: it is known to have none."""
        key = _PLACE.pack(head.topic_id, head.partition, head.offset)
        row = Row(
            position,
            size,
            whole,
            self.chain_of(head.key),
            head.run,
            head.state,
            head.attempt,
            head.due,
            head.first_at,
            head.told,
            head.key,
            head.failure,
            head.generation,
            head.epoch,
        )
        self.run = max(self.run, head.run)
        old = None if new else self._row(key)
        if old is None:
            self._insert(key, row)
        else:
            self._set(key, old, row)

    def change(self, changes: Changes) -> None:
        """Apply outcomes. A message that is unknown or settled stays as it is; without
        a failure the one before stays.
        """
        for place, state, attempt, due, failure in changes:
            key = _PLACE.pack(*place)
            row = self._row(key)
            if row is not None and row.state == State.STORED:
                new = row._replace(
                    state=state,
                    attempt=attempt,
                    due=due,
                    failure=failure or row.failure,
                    told=False,
                )
                self._set(key, row, new)

    def tell(self, told: Told) -> None:
        """Mark messages as told that are still in the state that was told."""
        for place, state, attempt, due in told:
            key = _PLACE.pack(*place)
            row = self._row(key)
            if row is not None and _is_news(row, state, attempt, due):
                self._set(key, row, row._replace(told=True))

    def is_news(self, place: Place, state: int, attempt: int, due: int) -> bool:
        """Return whether the broker has not been told that a message is in a state."""
        row = self.row(place)
        return row is not None and _is_news(row, state, attempt, due)

    def forget(self, places: Iterable[Place]) -> None:
        """Drop the rows of these messages."""
        for place in places:
            key = _PLACE.pack(*place)
            row = self._row(key)
            if row is not None:
                self._set(key, row, None)

    def row(self, place: Place) -> Row | None:
        """Return what is known of a message."""
        return self._row(_PLACE.pack(*place))

    def entry(self, place: Place) -> Entry | None:
        row = self.row(place)
        return None if row is None else entry_of(place, row)

    def rows(self, after: Place | None = None) -> Iterator[tuple[Place, Row]]:
        """Yield everything, by place, from behind a place on."""
        start = b"" if after is None else _PLACE.pack(*after) + b"\0"
        for key, fields in self._messages.range(start):
            yield place_of(key), _row(fields)

    def due(self, now: int) -> Iterator[tuple[int, Place]]:
        """Yield due time and place of what may be handed out, earliest first."""
        for key, _ in self._due.range(b"", _TIME.pack(now + 1)):
            yield _TIME.unpack_from(key)[0], place_of(key[_TIME.size :])

    def due_after(self, now: int) -> Iterator[Place]:
        """Yield what may be handed out only later."""
        for key, _ in self._due.range(_TIME.pack(now + 1)):
            yield place_of(key[_TIME.size :])

    def came_after(self, now: int) -> bool:
        """Return whether a message came later than `now`."""
        return any(True for _ in self._ages.range(_TIME.pack(now + 1)))

    def untold(self) -> Iterator[Place]:
        """Yield what the broker does not know, each key in its order."""
        for key, _ in self._untold.range(b""):
            yield place_of(key[_TIME.size :])

    def oldest(self) -> int:
        """Return when the oldest message came, 0 without any."""
        for key, _ in self._ages.range(b""):
            oldest: int = _TIME.unpack_from(key)[0]
            return oldest
        return 0

    def holds_key(self, key: str) -> bool:
        chain = self.chain_of(key)
        return chain is not None and self._chains.get(_TIME.pack(chain)) is not None

    def chain_of(self, key: str | None) -> int | None:
        """Return the number of the chain of a key, None where no order is kept."""
        return None if key is None or not self._ordered else key_hash(key) + SIGN

    def next_run(self, place: Place, chain: int | None) -> int:
        """Return the run of a message that arrives."""
        if chain is None:
            return self.run
        if ends := self._ends(_TIME.pack(chain)):
            run: int
            run, topic_id, partition, _ = _LINK.unpack(ends[1])
            if (topic_id, partition) == place[:2]:
                return run
        return self.run + 1

    def _row(self, key: bytes) -> Row | None:
        fields = self._messages.get(key)
        return None if fields is None else _row(fields)

    def _insert(self, key: bytes, row: Row) -> None:
        """Do what `_set` does for a message without a row: most are stored once."""
        self._messages.put(key, row)
        self._count_one(row, 1)
        if not row.told:
            self._untold.put(_TIME.pack(row.run) + key, _NO_ROW)
        if row.state not in _HOLDING:
            return
        self._ages.put(_TIME.pack(row.first_at) + key, _NO_ROW)
        if row.chain is None:
            self._move_due(key, None, _due(row))
        else:
            self._link(row.chain, key, row)

    def _link(self, chain: int, key: bytes, row: Row) -> None:
        """Add a message to its key's chain, mostly at its end."""
        prefix, link = _TIME.pack(chain), _TIME.pack(row.run) + key
        ends = self._ends(prefix)
        if ends is not None and link < ends[1]:
            self._rechain(chain, key, None, row, held=False, holds=True)
            return
        self._chains.put(prefix + link, _NO_ROW)
        if ends is None:
            self._move_due(key, None, _due(row))
            self._put_ends(prefix, (link, link))
        else:
            self._put_ends(prefix, (ends[0], link))

    def _set(self, key: bytes, old: Row | None, new: Row | None) -> None:
        if new is None:
            self._messages.delete(key)
        else:
            self._messages.put(key, new)
        self._count(old, new)
        row = new or old
        assert row is not None
        held = old is not None and old.state in _HOLDING
        holds = new is not None and new.state in _HOLDING
        if held != holds:
            _move(self._ages, _TIME.pack(row.first_at) + key, add=holds)
        was_untold = old is not None and not old.told
        is_untold = new is not None and not new.told
        if was_untold != is_untold:
            _move(self._untold, _TIME.pack(row.run) + key, add=is_untold)
        if row.chain is None:
            self._move_due(key, _due(old), _due(new))
        else:
            self._rechain(row.chain, key, old, new, held=held, holds=holds)

    def _rechain(
        self, chain: int, key: bytes, old: Row | None, new: Row | None, *, held: bool, holds: bool
    ) -> None:
        """Change a key's chain, and what of it is due: only its head."""
        row = new or old
        assert row is not None
        prefix, link = _TIME.pack(chain), _TIME.pack(row.run) + key
        before = self._head(prefix)
        if held != holds:
            _move(self._chains, prefix + link, add=holds)
            after = self._move_ends(prefix, link, add=holds)
        else:
            after = before
        if before == after:
            if before == key:
                self._move_due(key, _due(old), _due(new))
            return
        if before is not None:
            self._move_due(before, _due(old if before == key else self._row(before)), None)
        if after is not None:
            self._move_due(after, None, _due(new if after == key else self._row(after)))

    def _head(self, prefix: bytes) -> bytes | None:
        ends = self._ends(prefix)
        return None if ends is None else _key_of(ends[0])

    def _ends(self, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Return first and last link of a chain; the last answer is remembered."""
        if self._asked[0] != prefix:
            self._asked = prefix, self._chains.get(prefix)
        return self._asked[1]

    def _put_ends(self, prefix: bytes, ends: tuple[bytes, bytes] | None) -> None:
        self._asked = prefix, ends
        if ends is None:
            self._chains.delete(prefix)
        else:
            self._chains.put(prefix, ends)

    def _move_ends(self, prefix: bytes, link: bytes, *, add: bool) -> bytes | None:
        """Note first and last of a key's chain after a change; return the head."""
        ends = self._ends(prefix)
        if add:
            first, last = ends or (link, link)
            self._put_ends(prefix, (min(first, link), max(last, link)))
            return _key_of(min(first, link))
        assert ends is not None
        first, last = ends
        if first == last:
            self._put_ends(prefix, None)
            return None
        if link == first:
            first = self._neighbour(prefix, reverse=False)
        elif link == last:
            last = self._neighbour(prefix, reverse=True)
        self._put_ends(prefix, (first, last))
        return _key_of(first)

    def _neighbour(self, prefix: bytes, *, reverse: bool) -> bytes:
        """Return the first or the last link of a chain that has some."""
        start, stop = prefix + b"\0", prefix + b"\xff" * (_LINK.size + 1)
        return next(self._chains.range(start, stop, reverse=reverse))[0][len(prefix) :]

    def _move_due(self, key: bytes, old: int | None, new: int | None) -> None:
        if old == new:
            return
        if old is not None:
            self._due.delete(_TIME.pack(old) + key)
        if new is not None:
            self._due.put(_TIME.pack(new) + key, _NO_ROW)

    def _count(self, old: Row | None, new: Row | None) -> None:
        if old is not None:
            self._count_one(old, -1)
        if new is not None:
            self._count_one(new, 1)

    def _count_one(self, row: Row, sign: int) -> None:
        if row.state in _HOLDING:
            self.messages += sign
            self.bytes += sign * row.size
            self.attempts += sign * row.attempt
        else:
            self.settled += sign
        first = self._segment_of(row.position)
        counts = self.live.setdefault(first, [0, 0])
        counts[0] += sign
        counts[1] += sign * row.size
        if counts[0] <= 0:
            del self.live[first]


def entry_of(place: Place, row: Row) -> Entry:
    """Return a row as users see it."""
    return Entry(
        place,
        row.key,
        State(row.state),
        row.attempt,
        row.due,
        failure_of(row.failure),
        row.first_at,
        row.told,
        row.generation,
        row.epoch,
    )


def place_of(key: bytes) -> Place:
    """Return the place that a key of table `messages` stands for."""
    return Place(*_PLACE.unpack(key))


def _row(fields: tuple[Any, ...]) -> Row:
    if type(fields) is Row:
        return fields
    try:
        return Row(*fields)
    except TypeError as error:
        raise IndexDamaged.because(error) from error


def _is_news(row: Row, state: int, attempt: int, due: int) -> bool:
    return not row.told and (row.state, row.attempt, row.due) == (state, attempt, due)


def _due(row: Row | None) -> int | None:
    return row.due if row is not None and row.state == State.STORED else None


def _move(table: Table, key: bytes, *, add: bool) -> None:
    if add:
        table.put(key, _NO_ROW)
    else:
        table.delete(key)


def _key_of(link: bytes) -> bytes:
    """Return the key in table `messages` of a link of a chain."""
    return link[_TIME.size :]
