"""The consumer's local store: messages of a group and topic that wait on local disk."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self
from uuid import uuid4

from txmq.errors import DiskFull, StoreFull
from txmq.recover.local.damage import open_database
from txmq.recover.local.export import export_line
from txmq.recover.local.folder import prepare, require_owner
from txmq.recover.local.rows import (
    COLUMNS,
    LARGEST,
    STORE,
    Row,
    content_row,
    failure_text,
    identity_json,
    identity_of,
    message_of,
)
from txmq.recover.local.values import (
    Change,
    Entry,
    Place,
    Scanned,
    State,
    StoredMessage,
    StoreIdentity,
    StoreLimits,
    StoreOwner,
    StoreReport,
    StoreStats,
)
from txmq.store.ballast import Ballast
from txmq.store.filesystem import RealFileSystem

if TYPE_CHECKING:
    from txmq.model.retry import FailureReport
    from txmq.recover.local.database import Database

ToStore = tuple[StoredMessage, int, "FailureReport"]  # with due time and failure

OVERHEAD = 256  # bytes of a message beside its body, about
BALLAST = 16 << 20  # bytes that outcomes have on a full disk
AT_ONCE = 1_000  # messages of a transaction that bounds waits
DEFAULT_LIMITS = StoreLimits()
_SELECT = f"SELECT {COLUMNS} FROM message"  # noqa: S608  # names of ours
_FIRST_TWO_OF_KEY = (
    "SELECT id FROM message WHERE key = ? AND state <> 2 ORDER BY run, partition, offset LIMIT 2"
)


class LocalStore:
    """The store of one consumer group and topic on this machine.

    Any thread may call any method. They block; `put` and `record` return when what they
    did is on disk, and several threads share a sync. What is read is on disk, too.
    After a failure of the disk every method raises StoreClosed.

    On a full disk a ballast makes room for outcomes, and nothing new is taken until
    there is space for another one.
    """

    def __init__(
        self,
        database: Database,
        identity: StoreIdentity,
        limits: StoreLimits,
        now: Callable[[], int],
    ) -> None:
        self.identity, self.id, self.owner = identity, identity.id, identity.owner
        self.path, self.limits = database.path, limits
        self._database, self._now = database, now
        self._ballast = Ballast(RealFileSystem(), self.path, BALLAST)
        database.make_room, database.undone = self._ballast.release, self._load
        self._handed: set[Place] = set()
        self._damaged = 0
        self._written_at = 0  # by the clock of then
        self._counts: Counter[str] = Counter()
        self._run = 0
        database.read(self._load)
        if self._ballast.needed:
            with suppress(DiskFull):
                self._ballast.create()

    @classmethod
    def open(
        cls,
        directory: str,
        owner: StoreOwner,
        limits: StoreLimits = DEFAULT_LIMITS,
        *,
        now: Callable[[], int],
    ) -> tuple[Self, StoreReport]:
        """Open the owner's store below `directory`, or make it.

        `now` returns microseconds since the epoch. Raises DirectoryInUse where another
        process has it, ForeignStore for that of another owner, UnsupportedFormat for
        one of a newer version, StoreError for a place that cannot be used.
        """
        path = prepare(str(directory), owner)
        new = identity_json(StoreIdentity(uuid4(), owner))
        opened = open_database(path, STORE, new, renew=True)
        database = opened.database
        try:
            identity = identity_of(opened.about)
            require_owner(path, identity.owner, owner)
            store = cls(database, identity._replace(owner=owner), limits, now)
            if identity.owner.ordered != owner.ordered:
                database.run(store._reorder)
            returned = database.run(store._give_back_damaged) if opened.damage else []
        except BaseException:
            database.close()
            raise
        return store, StoreReport(
            identity.id,
            path,
            opened.created,
            opened.damage,
            opened.aside,
            tuple(returned),
            opened.lost,
        )

    def put(self, messages: Sequence[ToStore]) -> None:
        """Store messages that are not there yet; they are on disk at return.

        Messages of a key go in their order. Raises StoreFull or DiskFull before
        anything is stored.
        """
        for message, due, _ in messages:
            self._check(message, due)
        self._require_space()
        self._database.run(partial(self._put, messages=messages))

    def record(self, changes: Sequence[Change]) -> None:
        """Record outcomes; they are on disk at return.

        Outcomes of messages that are not there, or settled, change nothing. A change
        without a failure keeps the failure before it. DiskFull means that not even an
        outcome has space: it is kept in memory, and written with the next one.
        """
        try:
            self._database.run(partial(self._change, changes=changes), keep=True)
        finally:
            self._handed.difference_update([change.place for change in changes])

    def forget(self, places: Iterable[Place]) -> None:
        """Drop messages that are settled, or that the broker has.

        On disk soon; after a power cut they may be there again.
        """
        gone = list(places)
        if not gone:
            return
        try:
            self._database.run(partial(self._forget, places=gone), synced=False, keep=True)
        finally:
            self._handed.difference_update(gone)

    def quarantine(self, places: Iterable[Place], reason: str) -> int:
        """Take messages out of the queue, for good, and keep them for an operator.

        Return their number.
        """
        chosen = list(places)

        def move(connection: sqlite3.Connection) -> int:
            found = [row for place in chosen if (row := _row(connection, place)) is not None]
            lines = [
                (self._now(), reason, export_line(self._scanned(connection, r))) for r in found
            ]
            connection.executemany(
                "INSERT INTO quarantined (at, reason, line) VALUES (?, ?, ?)", lines
            )
            self._forget(connection, chosen)
            self._handed.difference_update(chosen)
            return len(found)

        self._database.write_kept()
        return self._database.run(move)

    def told(self, entries: Sequence[Entry]) -> None:
        """Mark entries of `untold` as known to the broker, unless they have changed
        since.

        On disk soon; after a power cut they may be told again.
        """
        rows = [(*e.place[1:], int(e.state), e.attempt, e.due) for e in entries]
        if rows:
            self._database.run(
                lambda connection: connection.executemany(
                    "UPDATE message SET told = 1 WHERE partition = ? AND offset = ?"
                    " AND state = ? AND attempt = ? AND due = ? AND told = 0",
                    rows,
                ),
                synced=False,
                keep=True,
            )

    def due(self, now: int, most: int) -> list[StoredMessage]:
        """Hand out messages whose time has come, at most `most`: of each key that is
        kept in order only the first.

        A message is handed out once, until `record` or `release`.
        """
        messages: list[StoredMessage] = []
        self._database.write_kept()
        while len(messages) < most:
            taken, damaged = self._database.read(
                partial(self._take, now=now, most=most - len(messages))
            )
            messages += taken
            if not damaged:
                break
            self._database.run(partial(self._give_back, rows=damaged))
        return messages

    def release(self, place: Place) -> None:
        """Take back a message that was handed out, unchanged."""
        self._handed.discard(place)

    def bound_waits(self, longest: int, farthest: int) -> int:
        """Let no message wait for longer than `longest`, where the clock is behind what
        it was when something was written here; otherwise for no longer than `farthest`.

        Return the number of messages whose wait was cut.
        """
        now, bounded = self._now(), 0
        latest = now + (longest if self._written_at > now else max(longest, farthest))
        query = f"{_SELECT} WHERE state = 1 AND head = 1 AND due > ? LIMIT ?"
        while True:
            rows = self._read_rows(query, latest, AT_ONCE)
            if not rows:
                return bounded
            stored, latest_due = State.STORED, latest
            self.record([Change(self._place(r), stored, r.attempt, latest_due) for r in rows])
            bounded += len(rows)

    def next_due(self) -> int | None:
        """Return when the next message is due, of those that are not handed out."""
        query = f"{_SELECT} WHERE state = 1 AND head = 1 ORDER BY due, partition, offset LIMIT ?"

        def first(connection: sqlite3.Connection) -> int | None:
            # Handed out are few, and among the first.
            for found in connection.execute(query, (len(self._handed) + 1,)):
                row = Row(*found)
                if self._place(row) not in self._handed:
                    return row.due
            return None

        return self._database.read(first)

    def untold(self, most: int) -> list[Entry]:
        """Return what the broker does not know, each key in its order."""
        return self._entries(
            f"{_SELECT} WHERE told = 0 ORDER BY run, partition, offset LIMIT ?", most
        )

    def entries(self, after: Place | None, most: int) -> list[Entry]:
        """Return what is known of all messages, by place: a page of those after one."""
        if after is None:
            return self._entries(f"{_SELECT} ORDER BY partition, offset LIMIT ?", most)
        query = f"{_SELECT} WHERE (partition, offset) > (?, ?) ORDER BY partition, offset LIMIT ?"
        return self._entries(query, *after[1:], most)

    def entry(self, place: Place) -> Entry | None:
        """Return what is known of a message."""
        row = self._database.read(partial(_row, place=place))
        return None if row is None else row.entry(self.owner.topic_id)

    def stats(self) -> StoreStats:
        """Return figures."""
        counts = self._counts
        limited = counts["messages"] >= self.limits.messages or counts["bytes"] >= self.limits.bytes
        return StoreStats(
            counts["messages"],
            counts["bytes"],
            self._database.read(_oldest) if counts["messages"] else 0,
            counts["attempts"],
            limited or self._disk_full,
            counts["settled"],
            self._database.disk_bytes(),
            self._disk_full,
            self._damaged,
        )

    def settle(self) -> None:
        """Bring to disk what may wait: what the broker knows, and what was dropped.

        A full disk leaves it for later.
        """
        with suppress(DiskFull):
            self._database.settle()

    def close(self) -> None:
        """Close the store; other calls then raise StoreClosed. Idempotent."""
        self._database.close()

    # In transactions

    def _load(self, connection: sqlite3.Connection) -> None:
        """Count what is there."""
        [row] = connection.execute(
            "SELECT sum(state = 2), sum(state <> 2), sum(size * (state <> 2)),"
            " sum(attempt * (state <> 2)), max(run), max(changed_at) FROM message"
        )
        settled, messages, size, attempts, self._run, written_at = (one or 0 for one in row)
        self._counts = Counter(settled=settled, messages=messages, bytes=size, attempts=attempts)
        self._written_at = max(self._written_at, written_at)

    def _count(self, row: Row, by: int) -> None:
        if row.holds:
            self._counts["messages"] += by
            self._counts["bytes"] += by * row.size
            self._counts["attempts"] += by * row.attempt
        else:
            self._counts["settled"] += by

    def _check(self, message: StoredMessage, due: int) -> None:
        place = message.place
        if place.topic_id != self.owner.topic_id:
            raise ValueError(f"{place} is not of topic {self.owner.topic_id}")
        numbers = (*place, message.attempt, due, message.generation, message.epoch)
        if min(numbers) < 0 or max(numbers) > LARGEST:
            raise ValueError(f"{numbers!r} where numbers belong")

    def _put(self, connection: sqlite3.Connection, messages: Sequence[ToStore]) -> None:
        new: dict[Place, ToStore] = {}
        for one in messages:
            place = one[0].place
            if place not in new and _row(connection, place) is None:
                new[place] = one
        self._require_room([message for message, _, _ in new.values()])
        now, contents = self._now(), []
        for message, due, failure in new.values():
            run, head, early = self._run_of(connection, message)
            row = Row(
                0,
                *message.place[1:],
                message.key,
                run,
                State.STORED,
                message.attempt,
                due,
                now,
                now,
                failure_text(failure),
                message.generation,
                message.epoch,
                len(message.body) + OVERHEAD,
                0,
                head,
            ).summed()
            marks = ", ".join("?" * (len(row) - 1))
            number = connection.execute(
                f"INSERT INTO message VALUES (NULL, {marks})",  # noqa: S608  # marks only
                row[1:],
            ).lastrowid
            assert number is not None, "a row has an id"
            contents.append(content_row(number, message))
            self._count(row, 1)
            if early and message.key is not None:
                self._promote(connection, message.key)
        # in the place of what is left of a message whose narrow row was damaged
        connection.executemany(
            "INSERT OR REPLACE INTO content VALUES (?, ?, ?, ?, ?, ?, ?, ?)", contents
        )

    def _run_of(
        self, connection: sqlite3.Connection, message: StoredMessage
    ) -> tuple[int, bool, bool]:
        """Return the run of a message that arrives, whether it may be handed out, and
        whether later ones of its key are there.
        """
        free = not self.owner.ordered
        if message.key is None:
            return self._run, True, False
        last = connection.execute(
            "SELECT run, partition, offset FROM message WHERE key = ? AND state <> 2"
            " ORDER BY run DESC, partition DESC, offset DESC LIMIT 1",
            (message.key,),
        ).fetchone()
        if last is not None and last[1] == message.place.partition:
            return last[0], free, last[2] > message.place.offset
        self._run += 1
        return self._run, free or last is None, False

    def _promote(self, connection: sqlite3.Connection, key: str) -> None:
        """Have the first message of a key handed out next, and not the second one."""
        if self.owner.ordered:
            found = connection.execute(_FIRST_TWO_OF_KEY, (key,)).fetchall()
            marks = [(int(not at), number) for at, (number,) in enumerate(found)]
            connection.executemany("UPDATE message SET head = ? WHERE id = ?", marks)

    def _change(self, connection: sqlite3.Connection, changes: Iterable[Change]) -> None:
        now = self._now()
        for place, state, attempt, due, failure in changes:
            row = _row(connection, place)
            if row is None or row.state != State.STORED:
                continue
            self._set(
                connection,
                row,
                row._replace(
                    state=int(state),
                    attempt=attempt,
                    due=due,
                    changed_at=now,
                    failure=failure_text(failure) or row.failure,
                ),
            )

    def _set(self, connection: sqlite3.Connection, old: Row, row: Row) -> None:
        """Change a row, of which the broker is to be told."""
        row = row.summed()
        connection.execute(
            "UPDATE message SET state = ?, attempt = ?, due = ?, changed_at = ?, failure = ?,"
            " told = 0, sum = ? WHERE id = ?",
            (row.state, row.attempt, row.due, row.changed_at, row.failure, row.sum, row.id),
        )
        self._count(old, -1)
        self._count(row, 1)
        if not row.holds and row.key is not None:
            self._promote(connection, row.key)

    def _forget(self, connection: sqlite3.Connection, places: Iterable[Place]) -> None:
        for place in places:
            row = _row(connection, place)
            if row is None:
                continue
            for table in ("message", "content"):
                connection.execute(f"DELETE FROM {table} WHERE id = ?", (row.id,))  # noqa: S608
            self._count(row, -1)
            if row.holds and row.key is not None:
                self._promote(connection, row.key)

    def _take(
        self, connection: sqlite3.Connection, now: int, most: int
    ) -> tuple[list[StoredMessage], list[Row]]:
        """Return messages to hand out, and rows that are damaged."""
        query = (
            f"{_SELECT} WHERE state = 1 AND head = 1 AND due <= ?"
            " ORDER BY due, partition, offset LIMIT ?"
        )
        messages: list[StoredMessage] = []
        damaged = []
        for found in connection.execute(query, (now, most + len(self._handed))):
            row = Row(*found)
            if self._place(row) in self._handed:
                continue
            message = message_of(connection, self.owner.topic_id, row)
            if message is None:
                damaged.append(row)
                continue
            self._handed.add(message.place)
            messages.append(message)
            if len(messages) == most:
                break
        return messages, damaged

    def _give_back(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> list[Place]:
        """Have the broker deliver its copies of messages that are damaged here."""
        for row in rows:
            self._set(connection, row, row._replace(state=State.RETURNED, failure=None))
        self._damaged += len(rows)
        if not all(row.sound for row in rows):
            self._reorder(connection)  # a key may be another one by now
        return [self._place(row) for row in rows]

    def _give_back_damaged(self, connection: sqlite3.Connection) -> list[Place]:
        """Give back what was rescued in part only."""
        damaged = [
            row
            for row in map(Row._make, connection.execute(_SELECT).fetchall())
            if not row.sound
            or (row.state == State.STORED and self._scanned(connection, row).message is None)
        ]
        self._reorder(connection)
        return self._give_back(connection, damaged)

    def _reorder(self, connection: sqlite3.Connection) -> None:
        """Find the first message of each key, by the group's rule of order."""
        ordered = self.owner.ordered
        connection.execute("UPDATE about SET value = ? WHERE name = 'ordered'", (ordered,))
        first = "id = (SELECT id FROM message AS other WHERE other.key = message.key"
        first += " AND state <> 2 ORDER BY run, partition, offset LIMIT 1)"
        rule = f"key IS NULL OR state = 2 OR {first}" if ordered else "1"
        connection.execute(f"UPDATE message SET head = ({rule}) WHERE head <> ({rule})")  # noqa: S608  # of ours

    def _entries(self, query: str, *arguments: int) -> list[Entry]:
        self._database.write_kept()
        rows = self._read_rows(query, *arguments)
        damaged = [row for row in rows if not row.sound]
        if damaged:
            self._database.run(partial(self._give_back, rows=damaged))
            rows = self._read_rows(query, *arguments)
        return [row.entry(self.owner.topic_id) for row in rows]

    def _read_rows(self, query: str, *arguments: int) -> list[Row]:
        return self._database.read(
            lambda connection: [Row(*found) for found in connection.execute(query, arguments)]
        )

    def _scanned(self, connection: sqlite3.Connection, row: Row) -> Scanned:
        topic_id = self.owner.topic_id
        return Scanned(row.entry(topic_id), message_of(connection, topic_id, row))

    def _place(self, row: Row) -> Place:
        return Place(self.owner.topic_id, row.partition, row.offset)

    # Space

    @property
    def _disk_full(self) -> bool:
        """True while nothing new is taken, for lack of space."""
        return self._database.kept or self._ballast.needed

    def _require_space(self) -> None:
        """Raise DiskFull unless outcomes will have space after what is put now."""
        if not self._disk_full:
            return
        if self._database.free_space() >= 2 * BALLAST:
            with suppress(DiskFull):
                self._database.write_kept()
                if self._ballast.needed:
                    self._ballast.create()
                return
        raise DiskFull(
            f"{self.path}: no space for more messages in the local store",
            hint="free space on that disk; the store then continues by itself, and until then"
            " outcomes of what it has are still recorded",
        )

    def _require_room(self, new: list[StoredMessage]) -> None:
        counts, limits = self._counts, self.limits
        size = sum(len(message.body) + OVERHEAD for message in new)
        if new and (
            counts["messages"] + len(new) > limits.messages or counts["bytes"] + size > limits.bytes
        ):
            raise StoreFull(
                f"{self.path}: {counts['messages']} messages of {counts['bytes']} bytes are"
                f" stored, the limits are {limits.messages} and {limits.bytes}: no room for"
                f" {len(new)} of {size} more"
            )


def _row(connection: sqlite3.Connection, place: Place) -> Row | None:
    query = f"{_SELECT} WHERE partition = ? AND offset = ?"
    found = connection.execute(query, place[1:]).fetchone()
    return None if found is None else Row(*found)


def _oldest(connection: sqlite3.Connection) -> int:
    """Return when the oldest message came, 0 without any."""
    query = "SELECT first_at FROM message WHERE state <> 2 ORDER BY id LIMIT 1"
    found = connection.execute(query).fetchone()
    return 0 if found is None else int(found[0])
