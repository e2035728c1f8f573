"""One spool: batches that wait for a broker, and those that were refused.

    stage ──► flush ──► read ──► mark_drained

`stage` costs memory only; `flush` brings everything staged to disk with one sync.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord, DiskFull, StoreError
from txmq.model.message import message_id
from txmq.recover.local.batches import (
    COLUMNS,
    SPOOL,
    Identity,
    Refusal,
    SpooledBatch,
    batch_of,
    identity_of,
    is_sound,
    refused_batches,
    retried,
    unsettled,
    waiting,
)
from txmq.recover.local.damage import Opened, open_database

if TYPE_CHECKING:
    from uuid import UUID

OVERHEAD = 128  # bytes of a batch beside the encoded one, about
SPARE = 1 << 20  # bytes that stay free on the disk, for what is noted
AT_ONCE = 64  # batches that are read at once


class SpoolReport(NamedTuple):
    """Findings of an opening: why the database was set aside, and where it is; how many
    batches are damaged, and stay in the table `damaged`.
    """

    damage: str = ""
    aside: str = ""
    lost: int = 0


class ToSend(NamedTuple):
    """The batches to send for a stored one: itself, or its rows if it was split.

    Refused ones are left out. `end` is the position after it.
    """

    batches: list[SpooledBatch]
    end: int


class Spool:
    """An open spool, which this process owns.

    `waiting` counts messages, `size` the bytes that they occupy, `end` is the position
    after the last batch on disk, `drained` that of the first one. Every call may raise
    DiskFull: nothing is changed then, except by `flush`, which may be called again. Any
    other StoreError is final. One thread drains; counters may be read by any.
    """

    def __init__(self, path: str, opened: Opened) -> None:
        self.path, self._database = path, opened.database
        self.identity = identity_of(path.rpartition("/")[2], opened.about)
        self._staged: list[tuple[object, ...]] = []
        self._lost = self._database.run(_move_damaged)
        self._refused = {  # with their ids in the table
            batch.messages: batch.position
            for batch, _ in self._database.read(lambda c: [*refused_batches(c)])
        }
        self._database.read(self._load)
        self._next = self.found_to = self.end  # those before are of earlier processes

    @classmethod
    def open(cls, path: str, new: Identity | None) -> tuple[Self, SpoolReport]:
        """Make a spool with the identity `new` in a directory; without it, open the one
        that is there.

        Raises DirectoryInUse where another process owns it, UnsupportedFormat where a
        newer txmq made it, and StoreError for anything else that is there.
        """
        opened = open_database(path, SPOOL, None if new is None else new.row())
        try:
            spool = cls(path, opened)
        except BaseException as error:
            opened.database.close()
            if isinstance(error, ValueError):
                hint = "move it away, or mend its table `about`"
                raise StoreError(f"{path}: no spool's identity: {error}", hint=hint) from error
            raise
        return spool, SpoolReport(opened.damage, opened.aside, spool._lost)

    def _load(self, connection: sqlite3.Connection) -> None:
        ids = connection.execute("SELECT min(id), max(id) + 1 FROM batch").fetchone()
        self.drained, self.end = (ids[0] or 1, ids[1] or 1)
        self.size = _size(connection, self.end)
        self.waiting = sum(one.count for one in waiting(connection))

    @property
    def refused(self) -> int:
        """Messages that the broker refused for good."""
        return sum(messages.count for messages in self._refused)

    def refusal_of(self, session: bytes, sequence: int) -> str | None:
        """Return the text of the refusal of a message, None without one."""
        query = "SELECT error || ': ' || text FROM refused WHERE id = ?"
        chosen = [
            (number,)
            for one, number in self._refused.items()
            if one.session == session and one.sequence <= sequence < one.sequence + one.count
        ]
        if not chosen:
            return None
        [text] = self._database.read(lambda c: c.execute(query, chosen[0]).fetchone())
        return str(text)

    @property
    def oldest_at(self) -> int:
        """The time at which the oldest waiting message was stored here, 0 = none."""
        query = "SELECT stored_at FROM batch WHERE id >= ? ORDER BY id LIMIT 1"
        found = self._database.read(
            lambda connection: connection.execute(query, (self.drained,)).fetchone()
        )
        return int(found[0]) if found is not None and self.waiting else 0

    def stage(self, batches: Iterable[SpooledBatch], now: int) -> None:
        """Stage batches, all or none."""
        listed = list(batches)
        size = sum(len(batch.encoded) + OVERHEAD for batch in listed)
        self.require_space(size)
        for batch in listed:
            self._staged.append(batch.row(self._next, now))
            self._next += 1
            self.waiting += batch.count
        self.size += size

    def flush(self) -> None:
        """Bring everything staged to disk. After DiskFull it may be called again."""
        crashpoint("spool.before_write")
        if self._staged:
            self._database.run(partial(_insert, rows=self._staged))
            self._staged, self.end = [], self._next
        crashpoint("spool.after_write")

    def read(self, position: int) -> Iterator[ToSend]:
        """Yield what the batches on disk from a position on have to send."""
        while position < self.end:
            found = self._database.read(partial(self._read_some, position=position))
            if not found:
                return
            yield from found
            position = found[-1].end

    def _read_some(self, connection: sqlite3.Connection, position: int) -> list[ToSend]:
        query = f"SELECT {COLUMNS}, split FROM batch WHERE id >= ? ORDER BY id LIMIT ?"  # noqa: S608  # of ours
        found = []
        for *row, split in connection.execute(query, (position, AT_ONCE)):
            try:
                batch = batch_of(tuple(row))
            except ValueError as error:
                hint = "the next start sets it aside, and sends the others"
                raise CorruptRecord(self.path, row[0], str(error), hint=hint) from error
            found.append(ToSend(unsettled(batch, self._refused, split=split), batch.end))
        return found

    def split(self, batch: SpooledBatch) -> None:
        """Have a batch sent row by row from now on. Durable at return."""
        self._execute("UPDATE batch SET split = 1 WHERE id = ?", batch.position)
        crashpoint("spool.after_split")

    def refuse(self, batch: SpooledBatch, refusal: Refusal) -> None:
        """Put a batch aside; the rest of its session is sent without it."""
        crashpoint("spool.before_refuse")
        row = (*batch.row(None, batch.stored_at), *refusal)
        marks = ", ".join("?" * len(row))
        statement = f"INSERT INTO refused VALUES ({marks})"  # noqa: S608  # marks only
        number = self._execute(statement, *row).lastrowid
        crashpoint("spool.after_refuse")
        assert number is not None, "a row has an id"
        self._refused[batch.messages] = number

    def refused_before(self, batch: SpooledBatch) -> bool:
        """Return whether the messages right before a batch were put aside."""
        return any(
            one.session == batch.session and one.sequence + one.count == batch.sequence
            for one in self._refused
        )

    def drop_refused(self, message_ids: Collection[str] | None) -> int:
        """Drop refused batches with one of these messages, all with None; return the
        number of their messages.
        """
        chosen = [
            one
            for one in self._refused
            if message_ids is None
            or any(
                message_id(one.session, one.sequence + n) in message_ids for n in range(one.count)
            )
        ]
        numbers = [(self._refused[one],) for one in chosen]
        self._database.run(
            lambda connection: connection.executemany("DELETE FROM refused WHERE id = ?", numbers)
        )
        for one in chosen:
            del self._refused[one]
        return sum(one.count for one in chosen)

    def retry_refused(self, now: int) -> int:
        """Have the refused batches sent again behind everything, and return the number
        of their messages.
        """
        batches = [one for one, _ in self._database.read(lambda c: [*refused_batches(c)])]
        rows = [retried(one).row(self._next + n, now) for n, one in enumerate(batches)]

        def move(connection: sqlite3.Connection) -> None:
            _insert(connection, rows)
            connection.execute("DELETE FROM refused")

        self._database.run(move)
        crashpoint("spool.after_retry")
        self._refused.clear()
        self._next = self.end = self._next + len(rows)
        taken = sum(one.count for one in batches)
        self.waiting += taken
        return taken

    def mark_drained(self, position: int, messages: int) -> None:
        """Remove everything before a position, which is drained. Durable some time
        later: the sequences make a repetition harmless.
        """
        crashpoint("spool.before_mark")
        self.drained = max(self.drained, position)
        self.waiting = max(0, self.waiting - messages)

        def delete(connection: sqlite3.Connection) -> int:
            size = _size(connection, position)
            connection.execute("DELETE FROM batch WHERE id < ?", (position,))
            return size

        with suppress(DiskFull):  # the next mark says the same
            self.size -= self._database.run(delete, synced=False)
        crashpoint("spool.after_mark")

    def set_log(self, log_id: UUID, incarnation: UUID | None) -> None:
        """Note the log of the broker and its incarnation."""
        identity = self.identity._replace(log_id=log_id, incarnation=incarnation)
        if identity != self.identity:
            rows = [*identity.row().items()]
            self._database.run(
                lambda connection: connection.executemany(
                    "INSERT OR REPLACE INTO about VALUES (?, ?)", rows
                )
            )
            self.identity = identity

    def close(self) -> None:
        """Release the spool, and remove it where nothing waits, and nothing was refused
        or set aside. Idempotent.
        """
        empty = not (self.waiting or self._refused or self._staged or self._lost)
        if empty and not self._database.failure:
            aside = next(Path(self.path).glob("damaged-*"), None)
            empty = aside is None
            crashpoint("spool.before_remove")
        self._database.close(remove=empty)

    def abandon(self) -> None:
        """Let go of the spool as it is, in the child of a fork as well."""
        self._database.close()

    def require_space(self, size: int) -> None:
        """Raise DiskFull where the disk has no room for so many bytes."""
        if self._staged:
            self.flush()
        if self._database.free_space() < size + SPARE:
            raise DiskFull(
                f"{self.path}: no space for the spool", hint="free space on that disk, or wait"
            )

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._database.run(lambda connection: connection.execute(statement, values))


def _insert(connection: sqlite3.Connection, rows: list[tuple[object, ...]]) -> None:
    marks = ", ".join("?" * 9)
    connection.executemany(f"INSERT INTO batch VALUES ({marks}, 0)", rows)  # noqa: S608  # marks only


def _size(connection: sqlite3.Connection, position: int) -> int:
    """Return the bytes of the batches before a position."""
    query = "SELECT coalesce(sum(length(encoded) + ?), 0) FROM batch WHERE id < ?"
    [size] = connection.execute(query, (OVERHEAD, position)).fetchone()
    return int(size)


def _move_damaged(connection: sqlite3.Connection) -> int:
    """Move damaged batches out of the queue, and return the number of all."""
    for table, split in (("batch", "split"), ("refused", "NULL")):
        query = f"SELECT {COLUMNS} FROM {table} ORDER BY id"  # noqa: S608  # names of ours
        damaged = [(row[0],) for row in connection.execute(query) if not is_sound(row)]
        connection.executemany(
            f"INSERT INTO damaged SELECT NULL, {COLUMNS[4:]}, {split} FROM {table} WHERE id = ?",  # noqa: S608
            damaged,
        )
        connection.executemany(f"DELETE FROM {table} WHERE id = ?", damaged)  # noqa: S608
    [count] = connection.execute("SELECT count(*) FROM damaged").fetchone()
    return int(count)
